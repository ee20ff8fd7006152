"""Stub of the page."""
import json
from autopar.page.figures import figures


def page(planned, path, machine=None, title=None):
    open(path, "w").write('<script type="application/json" id="autopar">' + json.dumps(figures(planned, machine)) + "</script>")
