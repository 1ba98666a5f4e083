"""Reports of a run, as self-contained HTML and as short Markdown. Pure: plain values in, text out.

A `describe_…` function makes a section of plain values; `render_section` writes it as an HTML page and
`render_markdown` as Markdown, so that the two cannot disagree. A `compose_…` function makes a page of several
sections for `render_page`. HTML pages load nothing and run nothing; every text in them is escaped, so a hostile
class label or error message stays a label or a message. A page stays below 300 kB whatever the length of the training.
"""

from kftrain.reports.comparison import comparison_html, compose_comparison_page, describe_comparison
from kftrain.reports.endings import describe_failure, describe_idle_run, describe_success
from kftrain.reports.evaluation import describe_evaluation
from kftrain.reports.markdown import render_markdown
from kftrain.reports.model_card import render_model_card
from kftrain.reports.page import describe_environment, render_page, render_section
from kftrain.reports.registration import describe_registration
from kftrain.reports.run import compose_run_page
from kftrain.reports.shards import describe_shards
from kftrain.reports.training import describe_training

__all__ = [
    "comparison_html",
    "compose_comparison_page",
    "compose_run_page",
    "describe_comparison",
    "describe_environment",
    "describe_evaluation",
    "describe_failure",
    "describe_idle_run",
    "describe_registration",
    "describe_shards",
    "describe_success",
    "describe_training",
    "render_markdown",
    "render_model_card",
    "render_page",
    "render_section",
]
