"""Show a model on a mesh in a notebook: a table of its modules with their layouts and seconds."""

from __future__ import annotations

import jinja2

from autopar.page.figures import figures_of
from autopar.page.subject import Subject

TEMPLATE = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(
    """<p><b>{{ title }}</b>: {{ "%.3f" | format(seconds * 1e3) }} ms on {{ machine.name }},
{{ "{:,}".format(memory) }} bytes of a rank at the peak
{%- if bound is not none %}, bound {{ "%.3f" | format(bound * 1e3) }} ms{% endif %}</p>
<table><thead><tr><th>module</th><th>parameters</th><th>result</th><th>ops ms</th><th>transfers ms</th></tr></thead>
<tbody>
{% for row in modules %}
<tr><td>{{ row.module or "(the model)" }}{% if row["count"] > 1 %} × {{ row["count"] }}{% endif %}</td>
<td>{% for name, type in row.parameters.items() %}{{ name }} <code>{{ type }}</code><br>{% endfor %}</td>
<td><code>{{ row.result or "" }}</code></td><td>{{ "%.3f" | format(row.seconds * 1e3) }}</td>
<td>{{ "%.3f" | format(row.transfer_seconds * 1e3) }}</td></tr>
{% endfor %}
</tbody></table>"""
)


def modules_as_html(subject: Subject) -> str:
    """Return the table as HTML."""
    return TEMPLATE.render(**figures_of(subject))
