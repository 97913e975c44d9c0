#!/usr/bin/env python3
"""The search of the site finds each recipe at the first hit: python3 check_search.py SITE.

Ranks the pages of the built index as the site's own search does, in outline: a hit in a tag counts a thousand times
one in a title, and that a thousand times one in the text; a rare word counts more than a common one, all words more
than some, and a page more than its sections. `boost` of a page multiplies all of it. Words match by their beginning,
which counts half.
"""

import html
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

WANTED = {  # what a user types, and the page that comes first
    "resume": "recipes/resume/",
    "restart": "recipes/resume/",
    "save": "recipes/resume/",
    "checkpoint": "recipes/resume/",
    "logging": "recipes/rank-0/",
    "log": "recipes/rank-0/",
    "broadcast object": "recipes/broadcast-object/",
    "accumulate": "recipes/accumulate/",
    "gradient accumulation": "recipes/accumulate/",
    "gradient clipping": "recipes/clip/",
    "clip_grad_norm": "recipes/clip/",
    "clip": "recipes/clip/",
    "mixed precision": "recipes/mixed-precision/",
    "autocast": "recipes/mixed-precision/",
    "fp16": "recipes/mixed-precision/",
    "amp": "recipes/mixed-precision/",
    "batchnorm": "recipes/batchnorm/",
    "syncbatchnorm": "recipes/batchnorm/",
    "learning rate": "recipes/learning-rate/",
    "batch size": "recipes/learning-rate/",
    "warmup": "recipes/learning-rate/",
    "validation": "recipes/evaluate/",
    "evaluate": "recipes/evaluate/",
    "uneven": "recipes/evaluate/",
    "early stopping": "recipes/early-stopping/",
    "preemption": "recipes/early-stopping/",
    "dockerfile": "recipes/docker/",
    "container": "recipes/docker/",
    "docker": "recipes/docker/",
    "kubernetes": "recipes/docker/",
    "host collectives": "recipes/gpu-host/",
    "gpu": "gpus/",
    "nccl": "gpus/",
    "install": "",
    "slurm": "clusters/",
    "ddp": "ddp/",
    "jupyter": "notebooks/",
}
FIELDS = {"text": 1, "title": 1e3, "tags": 1e6}  # what a word counts in each
SATURATION, LENGTH = 1.2, 0.75  # of lunr's ranking, BM25


class Field:
    """The words of all titles, or of all texts."""

    def __init__(self, texts: list[str]) -> None:
        plain = (html.unescape(re.sub("<[^>]+>", " ", text)).lower() for text in texts)
        self.words = [Counter(re.findall(r"\w[\w.]{2,}", text)) for text in plain]
        self.lengths = [sum(words.values()) for words in self.words]
        self.mean_length = sum(self.lengths) / len(texts)

    def scores(self, term: str) -> list[float]:
        """Of each entry, for one word of the query."""
        counts = [
            sum(n for word, n in words.items() if word.startswith(term)) / 2 + words[term] / 2
            for words in self.words
        ]
        n_hits = sum(map(bool, counts))
        rarity = math.log(1 + (len(counts) - n_hits + 0.5) / (n_hits + 0.5))
        norms = (SATURATION * (1 - LENGTH + LENGTH * n / self.mean_length) for n in self.lengths)
        return [rarity * (SATURATION + 1) * n / (norm + n) for n, norm in zip(counts, norms, strict=True)]


class Index:
    """What `mkdocs build` has written: an entry for each page and each of its sections."""

    def __init__(self, site: str) -> None:
        self.docs = json.loads(Path(site, "search/search_index.json").read_text(encoding="utf-8"))["docs"]
        self.fields = {
            weight: Field([" ".join(doc.get(name, [])) if name == "tags" else doc[name] for doc in self.docs])
            for name, weight in FIELDS.items()
        }

    def pages(self, query: str) -> list[str]:
        """The pages with any of the words, the best first."""
        by_term = []  # of each entry
        for term in query.lower().split():
            by_field = ([weight * n for n in field.scores(term)] for weight, field in self.fields.items())
            by_term.append([sum(scores) for scores in zip(*by_field, strict=True)])
        found = []
        for doc, scores in zip(self.docs, zip(*by_term, strict=True), strict=True):
            page, is_section, _ = doc["location"].partition("#")
            times = float(doc.get("boost", 1)) * (1 + (not is_section) + all(scores))
            found.append((times * sum(scores), page))
        return list(dict.fromkeys(page for score, page in sorted(found, reverse=True) if score))


def main(site: str) -> int:
    """Name every query whose page is not the first hit, and every recipe that no query asks for; the exit code."""
    index, wrong = Index(site), []
    for query, page in WANTED.items():
        pages = index.pages(query)
        if pages[:1] != [page]:
            wrong.append(f"{query!r} finds {pages[:3]}, not {page or 'the first page'!r}")
    recipes = {doc["location"] for doc in index.docs if re.fullmatch(r"recipes/[\w-]+/", doc["location"])}
    wrong += [f"no query asks for {page}" for page in sorted(recipes - set(WANTED.values()))]
    print("\n".join(wrong) or f"search: {len(WANTED)} queries find their pages first")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
