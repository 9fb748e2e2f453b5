"""The report: one page over runs, traces and snapshots, as HTML that needs nothing from outside, or as Markdown."""

from flopwise.render.report.evidence import Report, ReportPart
from flopwise.render.report.markdown import markdown_report
from flopwise.render.report.page import html_report

__all__ = ["Report", "ReportPart", "html_report", "markdown_report"]
