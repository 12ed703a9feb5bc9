#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""File lengths (over 400 lines is printed, over 800 fails), lines of C over 100 columns, the SPDX line, and names that are unique in the tree."""
import os, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOFT, HARD = 400, 800
COLUMNS = 100  # of C: what clang-format holds code to, it does not hold comments to


def main():
    bad, names = [], {}
    n = long = 0
    for top in ("include", "src", "engine", "server", "cli", "examples", "tests", "bench", "fuzz", "tools", "scripts"):
        for folder, _, files in os.walk(os.path.join(ROOT, top)):
            for f in sorted(files):
                if not f.endswith((".c", ".h", ".inc", ".py", ".sh")):
                    continue
                path = os.path.relpath(os.path.join(folder, f), ROOT)
                lines = open(os.path.join(ROOT, path), encoding="utf-8").read().split("\n")
                n += 1
                if path.endswith((".c", ".h")):
                    bad += [f"{path}:{i + 1}: {len(line)} columns; {COLUMNS} is the limit" for i, line in enumerate(lines) if len(line) > COLUMNS]
                if len(lines) > HARD:
                    bad.append(f"{path}: {len(lines)} lines; {HARD} is the limit")
                elif len(lines) > SOFT:
                    long += 1
                    print(f"{path}: {len(lines)} lines; better below {SOFT}")
                if f.endswith((".c", ".h", ".inc")):
                    if "SPDX-License-Identifier: Apache-2.0" not in lines[0]:
                        bad.append(f"{path}: the first line is not the SPDX line")
                    if top != "include":
                        names.setdefault(f, []).append(path)
    for f, paths in sorted(names.items()):
        if len(paths) > 1:
            bad.append(f"the name {f} is used more than once: {' '.join(paths)}")
    for line in bad:
        print(line)
    print(f"check_files: {n} files, {long} over {SOFT} lines, {len(bad)} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
