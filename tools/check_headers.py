#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every public prototype has a doc comment directly above it, and the comment says what a caller must know: each parameter, what comes back,
whether the call is collective, which threads may call. Exits 1 and names each prototype that has none or an incomplete one; --lenient lets
incomplete ones pass."""
import os, re, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def prototypes(text):
    """(line, comment or None, prototype) of each DCP_API declaration."""
    for m in re.finditer(r"^DCP_API\s[^;]*;", text, re.M):
        before = text[:m.start()].rstrip()
        comment = None
        if before.endswith("*/"):
            start = before.rfind("/*")
            if before[start:].startswith("/**"):
                comment = before[start:]
        yield text.count("\n", 0, m.start()) + 1, comment, re.sub(r"\s+", " ", m.group(0))


def parameters(prototype):
    inside = prototype[prototype.index("(") + 1:prototype.rindex(")")]
    names = []
    for p in inside.split(","):
        p = re.sub(r"\[[^\]]*\]", "", p).strip()
        if p not in ("void", "..."):
            names.append(re.findall(r"\w+", p)[-1])
    return names


def main():
    strict = "--lenient" not in sys.argv
    missing = lacking = n = 0
    folder = os.path.join(ROOT, "include", "dcpattn")
    for f in sorted(os.listdir(folder)):
        text = open(os.path.join(folder, f), encoding="utf-8").read()
        for line, comment, prototype in prototypes(text):
            n += 1
            name = re.search(r"(\w+)\(", prototype).group(1)
            if comment is None:
                missing += 1
                print(f"include/dcpattn/{f}:{line}: {name} has no doc comment")
                continue
            lacks = [p for p in parameters(prototype) if not re.search(rf"\b{re.escape(p)}\b", comment)]
            if "dcp_status " in prototype.split("(")[0] and "return" not in comment:
                lacks.append("@return")
            if "ollective" not in comment:
                lacks.append("Collective:")
            if "hread" not in comment:
                lacks.append("Threads:")
            if lacks:
                lacking += 1
                print(f"include/dcpattn/{f}:{line}: the comment of {name} does not mention {', '.join(lacks)}")
    print(f"check_headers: {n} public prototypes, {missing} without a comment, {lacking} with an incomplete one")
    return 1 if missing or (strict and lacking) else 0


if __name__ == "__main__":
    sys.exit(main())
