"""One self-contained HTML page: style, tables, sections. No script, no font, nothing loaded from anywhere.

All text that comes in is escaped; only `Html`, which this package makes itself, is passed on. A content security
policy in the page forbids scripts and loading as a second line of defence.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from replaylab.errors import UsageError


class Html(str):
    """Text that is HTML already."""


def escape(text: Any) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(str(text)))


# --- numbers for people


def number(value: Any) -> str:
    """A few digits: 53.51, 1426, 12.3k, 1.2M, 3.1e-5. What is not a number is a dash."""
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return "–"
    size = abs(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if size >= 1e13 or 0 < size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+", "e")
    if size >= 9999.5:
        scale, suffix = next((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= s * 0.9995)
        return plain(value / scale, 1 if size >= 1e2 * scale else 2) + suffix
    return plain(value, 0 if size >= 1e3 else 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 0.1 else 5)


def aligned(values: Sequence[float], error: float) -> list[str]:
    """As many decimals as two digits of the error need, five digits at most: 49.6 and 1.3, 1595 and 32."""
    if not 0 < abs(error) < math.inf:
        return [number(v) for v in values]
    decimals = 1 - math.floor(math.log10(float(f"{abs(error):.1e}")))  # 0.996 is shown as 1.0
    largest = max(map(abs, values))
    if 1 <= largest < math.inf:
        decimals = min(decimals, 4 - math.floor(math.log10(largest)))
    return [f"{v:,.{max(decimals, 0)}f}" if decimals < 6 and abs(v) < 1e13 else number(v) for v in values]


def plus_minus(mean: float, error: float | None) -> str:
    return number(mean) if error is None else " ± ".join(aligned([mean, error], error))


def plain(value: float, decimals: int) -> str:
    """Fixed decimals without trailing zeros, and never '-0'."""
    text = f"{value:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def count(value: Any, noun: str) -> str:
    """'1 seed', '12,000 seeds'."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def span(values: Iterable[int], noun: str) -> str:
    """'3 seeds', '3 to 5 seeds'."""
    low, high = min(values := list(values)), max(values)
    return count(low, noun) if low == high else f"{low:,} to {count(high, noun)}"


def duration(seconds: Any) -> str:
    """'41 s', '3 min 20 s', '2 h 05 min'."""
    if number(seconds) == "–" or not math.isfinite(seconds):
        return "–"
    if round(seconds) < 60:
        return f"{number(round(seconds, 1 if seconds < 10 else 0))} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def moment(stamp: Any) -> str:
    """'2026-11-19 14:23 UTC' of an ISO time stamp; what is none stays as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)[\d:.]*(\+00:00|Z)?", str(stamp or "–"))
    return f"{found[1]} {found[2]}{' UTC' if found[3] else ''}" if found else str(stamp or "–")


def size_of(amount: float) -> str:
    """Bytes for people: '3.5 MiB'."""
    power = min(4, max(0, int(math.log2(max(amount, 1)) // 10)))
    shown = float(f"{amount / 1024**power:.3g}") if power else amount
    return f"{number(shown)} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# --- pieces of a page


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Html:
    """A table that scrolls inside its own box; columns of numbers stand to the right."""
    rows = [list(row) for row in rows]
    plain_text = [[re.sub("<[^>]*>", "", str(cell)) for cell in row] for row in rows]
    right = [all(re.match(r"[-−]?\d|[–∞]|$", cell) for cell in column) for column in zip(*plain_text, strict=True)]

    def line(cells: Sequence[Any], tag: str) -> str:
        marks = (" class=n" if i and i < len(right) and right[i] else "" for i in range(len(cells)))
        return f"<tr>{''.join(f'<{tag}{m}>{escape(c)}</{tag}>' for m, c in zip(marks, cells, strict=True))}</tr>"

    top = f"<thead>{line(head, 'th')}</thead>" if head else ""
    body = "".join(line(row, "td") for row in rows)
    return Html(f'<div class="scroll" tabindex="0"><table>{top}<tbody>{body}</tbody></table></div>')


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Name and value, a line each."""
    return Html(f'<dl class="facts">{"".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)}</dl>')


def note(words: str) -> Html:
    """A paragraph in small print."""
    return Html(f'<p class="note">{escape(words)}</p>')


def status_word(status: Any) -> Html:
    """The status of a run, coloured where it is one that training writes."""
    known = status if status in ("finished", "failed", "interrupted") else ""
    return Html(f'<span class="status {known}">{escape(status)}</span>')


def warning_list(warnings: Sequence[str]) -> Html:
    return Html(f'<ul class="warnings">{"".join(f"<li>{escape(w)}</li>" for w in warnings)}</ul>' if warnings else "")


def details(summary: str, body: str) -> Html:
    return Html(f"<details><summary>{escape(summary)}</summary>{escape(body)}</details>")


def grid(figures: Iterable[str], *, small: bool = False, least: int = 330) -> Html:
    """Figures beside each other, each at least so many pixels wide."""
    width = "" if small or least == 330 else f' style="--least:{least}px"'
    return Html(f'<div class="grid{" small" if small else ""}"{width}>{"".join(figures)}</div>')


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str]]) -> Html:
    """The whole document. A section is (heading, HTML)."""
    links = "".join(f'<a href="#s{i}">{escape(heading)}</a>' for i, (heading, _) in enumerate(sections))
    body = "".join(
        f'<section id="s{i}"><h2>{escape(heading)}</h2>{escape(content)}</section>'
        for i, (heading, content) in enumerate(sections)
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return Html(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><header><h1>{escape(title)}</h1>"
        f"<p>{escape(subtitle)}</p><nav>{links}</nav></header><main>{body}</main></body></html>\n"
    )


def check_suffix(path: str | Path, known: Sequence[str] = (".html",)) -> Path:
    """A file is what its name says: the path, if it ends in one of these."""
    if not isinstance(path, str | Path):
        raise UsageError(f"a page is written to a path, not {type(path).__name__}")
    path = Path(path)
    if path.suffix.lower() not in known:
        raise UsageError(f"cannot write {path}: its name must end in {' or '.join(known)}")
    return path


def write_page(path: str | Path, text: str) -> Path:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "replace"))  # JSON may hold half a surrogate pair
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


# c: Okabe and Ito's palette, darkened or lightened where it would be too faint on the background. v: viridis from low
# to high, its dark end raised where the page is dark.
STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--text:#1b2330;--muted:#5a6575;--rule:#dfe4ea;--grid:#e9edf1;
--warn:#7a4a00;--warn-bg:#fff4dc;--good:#00694b;--bad:#a8321c;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b0478f;--c4:#b07a00;--c5:#2b9bd6;--c6:#6a51a3;--c7:#4d5663;
--v0:#440154;--v1:#46327e;--v2:#365c8d;--v3:#277f8e;--v4:#1fa187;--v5:#4ac16d;--v6:#a0da39;--v7:#fde725}
@media (prefers-color-scheme:dark){:root{--bg:#11151b;--card:#1a2029;--text:#e4e9f0;--muted:#9aa7b8;--rule:#2d3643;
--grid:#262e3a;--warn:#ffd58a;--warn-bg:#3a2c10;--good:#4fd1a5;--bad:#ff8d75;
--c0:#4aa8e0;--c1:#f08a3c;--c2:#2fc79b;--c3:#e08ac4;--c4:#e6b422;--c5:#7fd0f7;--c6:#b39ddb;--c7:#aab4c2;
--v0:#7a55c7;--v1:#6b74d6;--v2:#4f94d8;--v3:#35aec9;--v4:#2fc3a5;--v5:#63d380;--v6:#abe04c;--v7:#fde725}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-text-size-adjust:100%}
header,main{max-width:1280px;margin:0 auto;padding:0 16px}
header{padding-top:28px}
h1{font-size:1.65rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere;letter-spacing:-.01em}
header p{color:var(--muted);margin:0 0 12px;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:6px}
nav a{font-size:.85rem;padding:4px 11px;border:1px solid var(--rule);border-radius:99px;background:var(--card);
color:var(--text);text-decoration:none}
nav a:hover,nav a:focus-visible{border-color:var(--c0)}
section{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:18px;margin:16px 0;
scroll-margin-top:8px}
main{padding-bottom:40px}
h2{font-size:1.15rem;margin:0 0 10px}
h3{font-size:.95rem;margin:0 0 4px;overflow-wrap:anywhere}
h4{font-size:1rem;margin:22px 0 8px;overflow-wrap:anywhere}
h2+h4{margin-top:0}
p{margin:8px 0;overflow-wrap:anywhere}
.note,figcaption,.scale{color:var(--muted);font-size:.84rem;line-height:1.45}
.nothing{border:1px dashed var(--rule);border-radius:8px;padding:14px;color:var(--muted);margin:8px 0}
.scroll{overflow-x:auto;margin:8px 0;width:fit-content;max-width:100%;min-width:min(100%,30em);
-webkit-overflow-scrolling:touch;border:1px solid var(--rule);border-radius:8px}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 9px;text-align:left;vertical-align:top;white-space:nowrap}
th{color:var(--muted);font-weight:600;font-size:.8rem;background:var(--bg)}
tbody tr+tr td,thead+tbody tr:first-child td{border-top:1px solid var(--rule)}
.n{text-align:right}
td:first-child,th:first-child{position:sticky;left:0;background:var(--card);white-space:normal;overflow-wrap:anywhere;
min-width:min(11em,37vw);max-width:min(22em,45vw)}
th:first-child{background:var(--bg)}
small{color:var(--muted);font-weight:400}
section>:last-child{margin-bottom:0}
.wide{white-space:normal;overflow-wrap:anywhere;min-width:11em;display:block}
.facts{display:grid;grid-template-columns:fit-content(45%) minmax(0,1fr);gap:3px 18px;margin:8px 0 14px;
font-size:.94rem}
.facts dt{color:var(--muted)}
.facts dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.hero{display:flex;align-items:baseline;gap:12px;font-size:2.4rem;font-weight:650;line-height:1.15;letter-spacing:-.02em;
overflow-wrap:break-word;margin:2px 0}
.hero small{font-size:1.05rem;font-weight:400;line-height:1.4;letter-spacing:0}
.warnings{list-style:none;margin:8px 0 14px;padding:0;display:grid;gap:6px}
.warnings li{background:var(--warn-bg);color:var(--warn);border-radius:8px;padding:7px 12px;font-size:.88rem;
overflow-wrap:anywhere}
.warnings li::before{content:"⚠ ";font-family:system-ui,sans-serif}
.status{font-weight:600}.finished{color:var(--good)}.failed{color:var(--bad)}.interrupted{color:var(--warn)}
details{margin:8px 0}
summary{cursor:pointer;font-weight:600;font-size:.92rem;padding:4px 0;overflow-wrap:anywhere}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--least,330px)),1fr));
gap:22px 28px;margin:8px 0}
.grid.small{grid-template-columns:repeat(auto-fill,minmax(min(46%,190px),1fr));gap:14px 18px}
.phases{display:flex;flex-wrap:wrap;gap:0 28px}.phases h4{margin-top:10px}.phases>div{min-width:0;max-width:100%}
.small h3{font-size:.82rem;font-weight:500;color:var(--muted);margin:0}
figure{margin:0;min-width:0;max-width:470px}
figure svg{display:block;width:100%;height:auto}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--muted)}
svg .label{fill:var(--text)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 2px;padding:0;font-size:.82rem}
.legend li{display:flex;align-items:center;gap:6px;overflow-wrap:anywhere}
.legend svg{width:24px;flex:none}
.grid-line{stroke:var(--grid)}.axis{stroke:var(--muted)}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.band{fill:var(--c);opacity:.16}.bar,circle{fill:var(--c)}.bar{opacity:.85}
.whisker{stroke:var(--text);stroke-width:1.6;fill:none}
.scale span{display:inline-flex;vertical-align:middle}.scale i{width:14px;height:10px}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}
.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}
.v0{--v:var(--v0)}.v1{--v:var(--v1)}.v2{--v:var(--v2)}.v3{--v:var(--v3)}
.v4{--v:var(--v4)}.v5{--v:var(--v5)}.v6{--v:var(--v6)}.v7{--v:var(--v7)}
.cell{fill:var(--v)}.scale i{background:var(--v)}
@media (max-width:480px){header,main{padding-left:10px;padding-right:10px}section{padding:14px 12px}}
@media print{section{break-inside:avoid;border:0}nav{display:none}}
figure img{width:100%;image-rendering:pixelated}
"""
