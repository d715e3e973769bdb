"""Check an HTML page: tags balance, nothing is loaded from elsewhere, no script."""

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.html, self.text, self.open = html, "", []
        self.tags: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form", "use", "image"}, tag
        for name, value in attrs:
            if (tag, name) == ("img", "src"):  # a film or picture that is part of the page
                assert value.startswith(("data:image/gif;base64,", "data:image/png;base64,")), value[:40]
                continue
            assert not name.startswith("on") and name not in {"src", "srcset", "data", "action", "xlink:href"}, name
            assert name != "href" or value.startswith("#"), value
            drawn = name in {"d", "x", "y", "cx", "cy", "viewBox"}
            assert not drawn or not re.search("nan|inf", value), f"{name}={value}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if "style" in self.open:
            assert "url(" not in data and "@import" not in data
        else:
            self.text += data


def check_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
