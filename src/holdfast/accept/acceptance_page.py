"""The report of an acceptance as a single HTML file. Pure."""

from __future__ import annotations

import json
import time
from html import escape
from importlib.resources import files

from holdfast.accept.acceptance import Acceptance
from holdfast.accept.check_report import CheckReport, Figure, Verdict
from holdfast.findings import OWNER_TEXT, Finding
from holdfast.report.formatting import duration, sanitize

_STYLES = {Verdict.PASSED: "succeeded", Verdict.FAILED: "failed", Verdict.NOT_APPLICABLE: "dim"}


def acceptance_page(acceptance: Acceptance) -> str:
    """The whole file: no scripts, nothing fetched, everything escaped."""
    style = files("holdfast.report").joinpath("report.css").read_text()
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(acceptance.began_at))
    title = f"Acceptance of {acceptance.target}"
    body = "".join(
        (
            f"<h1>{_text(title)}</h1>",
            f"<p class='dim'>{_text(acceptance.name)}: a target of kind {_text(acceptance.kind)}, {began}</p>",
            _overview(acceptance),
            *map(_check, acceptance.reports),
            f"<h2>Agreement</h2><pre>{_lines(json.dumps(json.loads(acceptance.agreement), indent=2))}</pre>",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(title)}</title><style>{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def _overview(acceptance: Acceptance) -> str:
    rows = "".join(
        f"<tr><td>{_text(each.check)}</td><td>{_verdict(each.verdict)}</td>"
        f"<td class='n'>{duration(each.took_s)}</td></tr>"
        for each in acceptance.reports
    )
    left = "".join(f"<tr><td>{_text(check)}</td><td>not run</td><td></td></tr>" for check in acceptance.left)
    head = "<tr><th>check</th><th>verdict</th><th class=n>time</th></tr>"
    return f"<div class='scroll'><table><thead>{head}</thead><tbody>{rows}{left}</tbody></table></div>"


def _check(report: CheckReport) -> str:
    evidence = f"<pre>{_lines(chr(10).join(report.evidence))}</pre>" if report.evidence else ""
    runs = f"<p class='dim'>runs: {_text(', '.join(report.runs))}</p>" if report.runs else ""
    return (
        f"<h2>{_text(report.check)}: {_verdict(report.verdict)}</h2>{_finding(report.finding)}"
        f"{_figures(report.figures)}{evidence}{runs}"
    )


def _figures(figures: tuple[Figure, ...]) -> str:
    if not figures:
        return ""
    rows = "".join(
        f"<tr><td>{_text(each.name)}</td><td>{_text(each.value)}</td><td>{_text(each.agreed)}</td>"
        f"<td>{'' if not each.agreed else 'met' if each.met else '<b>missed</b>'}</td></tr>"
        for each in figures
    )
    head = "<tr><th>figure</th><th>measured</th><th>agreed</th><th></th></tr>"
    return f"<div class='scroll'><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


def _finding(finding: Finding | None) -> str:
    if finding is None:
        return ""
    quoted = f"<pre>{_lines(chr(10).join(finding.evidence))}</pre>" if finding.evidence else ""
    who = f"<span class='dim'>({OWNER_TEXT[finding.owner]})</span>"
    return (
        f"<p><b>{_text(finding.what)}</b> <span class='dim'>{_text(finding.code)} · {_text(finding.where)}</span></p>"
        f"{quoted}<p><b>What to do:</b> {_text(finding.remedy)} {who}</p>"
    )


def _verdict(verdict: Verdict) -> str:
    return f"<span class='{_STYLES[verdict]}'>{_text(verdict)}</span>"


def _text(words: object) -> str:
    """Escaped, without control characters: programs may have printed anything."""
    return escape(sanitize(str(words)))


def _lines(text: str) -> str:
    return "\n".join(map(_text, text.splitlines()))
