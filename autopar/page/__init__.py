"""Draw what was decided for a model as one HTML file, and give the same figures as data."""

from autopar.page.figures import figures_of
from autopar.page.subject import Alternative, Part, Subject
from autopar.page.write import page_text, write_page

__all__ = ["Alternative", "Part", "Subject", "figures_of", "page_text", "write_page"]
