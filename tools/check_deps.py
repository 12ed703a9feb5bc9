#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who may include whom, read from the #includes. Run from anywhere; exits 1 and names each line that breaks the rule."""
import os, re, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A part of src/ and the parts whose headers it may see (its own always).
SRC = {
    "base": [],
    "num": ["base"],
    "shard": ["num", "base"],
    "plan": ["shard", "num", "base"],
    "kernels": ["num", "base"],
    "group": ["base"],
    "merge": ["group", "kernels", "plan", "shard", "num", "base"],
    "cache": ["shard", "num", "base"],
    "attend": ["merge", "cache", "group", "kernels", "plan", "shard", "num", "base"],
}
# The part that a public header belongs to. A part may include it if it may see the part.
PUBLIC = {"status": "base", "types": "base", "pool": "base", "shard": "shard", "plan": "plan", "group": "group", "mpi": "group", "mpi_module": "group", "merge": "merge",
          "cache": "cache", "attend": "attend", "dcpattn": "attend"}
# Named exceptions, each with its reason.
EXCEPTIONS = {
    ("kernels", "dcpattn/cache.h"): "dcp_kv_view, the layout that attention kernels read",
    ("cli", "base/status_priv.h"): "errors of the command are recorded like the library's",
    ("cli", "base/alloc_priv.h"): "buffers of the command are counted like the library's",
    ("cli", "base/clock_priv.h"): "the same clock",
    ("cli", "base/cpu_priv.h"): "`info` prints what the library detects",
    ("cli", "group/group_priv.h"): "`bench merge` reads the peers' partials itself, for the roof",
    ("cli", "base/hash_priv.h"): "the hash by which the library, too, sees that ranks hold the same",
    ("cli", "kernels/kernels_priv.h"): "`bench attend` asks how far a kernel cuts weights, for what it may be off",
    ("cli", "base/pool_priv.h"): "the roofs of `bench attend` run on the threads that attend",
}
OUTER = {  # folders outside src/: parts of src/ and outer folders that they may see, public headers besides
    "engine": ["engine", "base", "num", "kernels"],
    "server": ["server", "engine"],
    "cli": ["cli", "engine"],
    "examples": ["examples"],
}
STANDARD = set("""assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdalign stdarg stdatomic stdbool stddef
stdint stdio stdlib stdnoreturn string tgmath threads time uchar wchar wctype dirent dlfcn fcntl ftw glob libgen link malloc pthread poll sched
semaphore spawn strings syscall termios ucontext unistd cpuid immintrin x86intrin elf execinfo""".split())


def is_standard(name):
    return name.startswith(("sys/", "linux/", "asm/", "arpa/", "netinet/")) or name[:-2] in STANDARD


def sources():
    for top in ("include", "src", "engine", "server", "cli", "examples", "tests", "bench", "fuzz"):
        for folder, _, files in os.walk(os.path.join(ROOT, top)):
            for f in sorted(files):
                if f.endswith((".c", ".h", ".inc")):
                    yield os.path.relpath(os.path.join(folder, f), ROOT)


def main():
    bad, third = [], {}
    n = 0
    for path in sources():
        parts = path.split("/")
        area = parts[0]
        n += 1
        for number, line in enumerate(open(os.path.join(ROOT, path), encoding="utf-8"), 1):
            m = re.match(r'\s*#\s*include\s+([<"])([^>"]+)[>"]', line)
            if not m:
                continue
            name, where = m.group(2), f"{path}:{number}"
            if m.group(1) == "<":
                if not is_standard(name):
                    # Examples are programs of users, who write <dcpattn/...> and <mpi.h>.
                    if area not in ("tests", "bench", "fuzz", "examples"):
                        third.setdefault(name.split("/")[0], set()).add(path)
                continue
            if area in ("tests", "bench", "fuzz") and os.path.exists(os.path.join(ROOT, os.path.dirname(path), name)):
                continue
            if "/" not in name:
                bad.append(f'{where}: "{name}" is not written from a root; give its folder')
                continue
            if not any(os.path.exists(os.path.join(ROOT, base, name)) for base in ("", "src", "include", "tests")):
                bad.append(f'{where}: "{name}" is not in the tree')
                continue
            if area in ("tests", "bench", "fuzz"):
                continue
            owner = name.split("/")[0]
            me = parts[1] if area == "src" else area
            if (me, name) in EXCEPTIONS:
                continue
            if owner == "dcpattn":
                part = PUBLIC.get(name[len("dcpattn/"):-2])
                if part is None:
                    bad.append(f"{where}: {name} has no owner; name it in tools/check_deps.py")
                elif area == "src" and part != me and part not in SRC[me]:
                    bad.append(f"{where}: src/{me} may not see {name}, which belongs to {part}")
            elif area == "include":
                bad.append(f"{where}: a public header includes {name}, which is not public")
            elif area == "src" and owner != me and owner not in SRC.get(me, []):
                bad.append(f"{where}: src/{me} may not see {owner} (allowed: {' '.join(SRC.get(me, [])) or 'nothing'})")
            elif area in OUTER and owner not in OUTER[area]:
                bad.append(f"{where}: {area}/ may not see {name}")
    third.get("mpi.h", set()).discard("include/dcpattn/mpi.h")  # the header for callers that have a communicator of their own
    for lib, users in sorted(third.items()):
        if len(users) != 1 or not next(iter(users)).endswith(".c"):
            bad.append(f"<{lib}> must be included by exactly one .c file, not by: {' '.join(sorted(users))}")
    for line in bad:
        print(line)
    print(f"check_deps: {n} files, {len(third)} third-party headers, {len(bad)} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
