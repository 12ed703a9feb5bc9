#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The binary interface: sizes, offsets and enumerators of the public headers, and what the shared library exports, beside what is stored.

  abi.py LIBDCPATTN.SO            compare with tests/unit/abi_sizes.inc and tests/unit/abi_symbols.txt
  abi.py LIBDCPATTN.SO --update   store what there is: `make abi` (a change here is a change for every caller; say so in the commit)

An exported symbol must be declared by a public header, dcp__group_module aside, which the MPI modules ask for. Exits 1 and names each difference."""
import os, re, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEADERS = os.path.join(ROOT, "include", "dcpattn")
SIZES = os.path.join(ROOT, "tests", "unit", "abi_sizes.inc")
SYMBOLS = os.path.join(ROOT, "tests", "unit", "abi_symbols.txt")
INTERNAL = {"dcp__group_module"}
NOT_IN_LIBRARY = {"mpi.h"}  # its functions are the modules'


def plain(name):
    """The text of a header without comments, preprocessor lines and what only C++ sees."""
    text = re.sub(r"/\*.*?\*/", " ", open(os.path.join(HEADERS, name), encoding="utf-8").read(), flags=re.S)
    text = re.sub(r"\\\n", " ", text)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def headers():
    return sorted(f for f in os.listdir(HEADERS) if f.endswith(".h") and f not in NOT_IN_LIBRARY)


def expanded():
    """All of the headers, with macros expanded and without comments."""
    text = "".join(f'#include "dcpattn/{h}"\n' for h in headers())
    command = [os.environ.get("CC", "cc"), "-E", "-P", "-std=c11", "-I" + os.path.join(ROOT, "include"), "-x", "c", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def fields(body):
    for declaration in body.split(";"):
        if not declaration.strip():
            continue
        pointer = re.search(r"\(\s*\*\s*(?:const\s+)?(\w+)\s*\)\s*\(", declaration)
        if pointer:
            yield pointer.group(1)
            continue
        for piece in declaration.split(","):
            yield re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", piece))[-1]


def sizes():
    """The lines of abi_sizes.inc, measured by the C compiler."""
    lines, text = [], expanded()
    for m in re.finditer(r"\benum\s+(dcp_\w+)\s*\{([^}]*)\}", text):
        for entry in filter(None, (e.strip() for e in m.group(2).split(","))):
            key = re.match(r"\w+", entry).group(0)
            lines.append(f'printf("VALUE({key}, %lld)\\n", (long long){key});')
    for m in re.finditer(r"\bstruct\s+(dcp_\w+)\s*\{([^{}]*)\}", text):
        struct = m.group(1)
        lines.append(f'printf("SIZE({struct}, %zu)\\n", sizeof(struct {struct}));')
        for f in fields(m.group(2)):
            lines.append(f'printf("FIELD({struct}, {f}, %zu)\\n", offsetof(struct {struct}, {f}));')
    with tempfile.TemporaryDirectory() as folder:
        source, exe = os.path.join(folder, "probe.c"), os.path.join(folder, "probe")
        with open(source, "w", encoding="utf-8") as f:
            f.write("#include <stddef.h>\n#include <stdio.h>\n" + "".join(f'#include "dcpattn/{h}"\n' for h in headers()))
            f.write("int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-I" + os.path.join(ROOT, "include"), source, "-o", exe], check=True)
        return subprocess.run([exe], capture_output=True, text=True, check=True).stdout.splitlines()


def exported(library):
    text = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return sorted(line.split()[-1].split("@")[0] for line in text.splitlines() if line.split()[-2] in "TDBRVW")


def declared():
    return {m for h in headers() for m in re.findall(r"\bDCP_API\b[^;]*?\b(\w+)\s*\(", plain(h))}


def stored(path):
    if not os.path.exists(path):
        return []
    return [line for line in open(path, encoding="utf-8").read().splitlines() if line and not line.startswith(("/*", "#"))]


def main():
    update = "--update" in sys.argv
    library = [a for a in sys.argv[1:] if not a.startswith("-")]
    if len(library) != 1:
        sys.exit(__doc__)
    now, symbols, public = sizes(), exported(library[0]), declared()
    bad = [f"{s} is exported, and no public header declares it" for s in symbols if s not in public | INTERNAL]
    bad += [f"{s} is declared, and the library does not export it" for s in sorted(public) if s not in symbols]
    if update and not bad:
        with open(SIZES, "w", encoding="utf-8") as f:
            f.write("/* SPDX-License-Identifier: Apache-2.0 */\n/* Written by tools/abi.py: `make abi`. LP64. */\n" + "\n".join(now) + "\n")
        with open(SYMBOLS, "w", encoding="utf-8") as f:
            f.write("# What libdcpattn.so exports. Written by tools/abi.py: `make abi`.\n" + "\n".join(symbols) + "\n")
    for what, new, old in (("sizes", now, stored(SIZES)), ("symbols", symbols, stored(SYMBOLS))):
        bad += [f"{what}: new: {line}" for line in new if line not in set(old)] + [f"{what}: gone: {line}" for line in old if line not in set(new)]
    for line in bad:
        print(line)
    print(f"abi: {len(now)} sizes, offsets and values, {len(symbols)} symbols, {len(bad)} differences" + ("; if they are meant: make abi" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
