#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every test there is, on a build: ctest, then the golden cases with the combinations of options that matter, each pair at least once.

  run.py BUILD [--quick] [--only SUBSTRING] [--list]

Needs python3 and numpy. Golden cases on real models need the models in the cache (scripts/fetch-model.sh); where they or an MPI are missing,
the cases are skipped, counted, and the reason is printed. Last line 'N passed, N failed, N skipped'; exits 1 if any failed."""
import argparse, json, os, re, shutil, subprocess, sys, time
import xml.etree.ElementTree as xml

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "golden")
OPEN_MPI = "mpirun.openmpi --allow-run-as-root --oversubscribe -n {n}"
MPICH = "mpirun.mpich -n {n}"


class Sums:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0
        self.failures, self.reasons = [], {}

    def skip(self, n, why):
        self.skipped += n
        self.reasons[why] = self.reasons.get(why, 0) + n


def models_folder():
    base = os.environ.get("DCP_ATTN_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dcp-attn")
    return os.path.join(base, "models")


def golden_commands(exe):
    """(name, how many cases if skipped, why skipped or None, command) in order."""
    check = [sys.executable, os.path.join(GOLDEN, "check.py"), exe]
    generate = [sys.executable, os.path.join(GOLDEN, "check_generate.py"), exe, "--models", models_folder()]
    out = []

    def count(only):
        """Cases whose name holds the text, as the two scripts choose them."""
        return sum(only in f"{kind}/{case}" for kind in ("merge", "attend", "generate", "perplexity") for case in os.listdir(os.path.join(GOLDEN, kind)))

    cases = count("merge/") + count("attend/")

    def mpi(command):
        return None if shutil.which(command.split()[0]) else f"no {command.split()[0]}"

    for comm, algo in (("threads", "direct"), ("threads", "alltoall"), ("threads", "allreduce"), ("shm", "direct"), ("shm", "alltoall"), ("shm", "allreduce"), ("shm", "auto")):
        out.append((f"golden --comm {comm} --algo {algo}", cases, None, check + ["--also", f"--comm {comm} --algo {algo}"]))
    for isa in ("scalar", "avx2"):
        out.append((f"golden --comm threads --isa {isa}", cases, None, check + ["--also", f"--comm threads --isa {isa}"]))
    for algo in ("direct", "alltoall", "allreduce"):
        out.append((f"golden Open MPI --algo {algo}", cases, mpi(OPEN_MPI), check + ["--launch", OPEN_MPI, "--also", f"--algo {algo}"]))
    # MPICH polls: more ranks than cores would crawl, so its cases are those of one and two ranks.
    for case in ("merge/one-rank", "merge/two-ranks", "merge/published-base-example"):
        if os.path.isdir(os.path.join(GOLDEN, case)) and json.load(open(os.path.join(GOLDEN, case, "case.json"))).get("ranks", 9) <= 2:
            out.append((f"golden MPICH {case}", 1, mpi(MPICH), check + ["--launch", MPICH, "--only", case]))

    lack = [m for m in ("smollm2-135m", "gemma3-270m") if not os.path.exists(os.path.join(models_folder(), m + ".gguf"))]
    lack = f"no model {' and '.join(lack)}; scripts/fetch-model.sh fetches them" if lack else None
    out.append(("tokenize", 156, lack, generate + ["--only", "tokenize"]))
    # Pairs of ranks, transport, algorithm, chunk and interleave; chunks of 1 and 7 on the short prompts.
    for only, also in (
            ("generate", "-n 1"),
            ("generate", "-n 2 --comm shm --algo direct --chunk 512 --interleave 16"),
            ("generate", "-n 3 --comm threads --algo alltoall --chunk 64 --interleave 1"),
            ("generate", "-n 4 --comm shm --algo alltoall --chunk 512 --interleave 1"),
            ("generate", "-n 5 --comm threads --algo direct --chunk 512 --interleave 16"),
            ("generate", "-n 8 --comm shm --algo direct --chunk 64 --interleave 16"),
            ("generate/smollm2-chat", "-n 3 --comm shm --algo alltoall --chunk 7 --interleave 16"),
            ("generate/gemma3-raw", "-n 4 --comm threads --algo direct --chunk 1 --interleave 1"),
            ("generate/smollm2-raw", "-n 5 --comm shm --algo allreduce --chunk 1 --interleave 16"),
            ("generate/smollm2-one-token", "-n 8 --comm threads --algo alltoall --chunk 7 --interleave 1"),
            ("perplexity", "-n 1"),
            ("perplexity", "-n 4 --comm shm --chunk 64 --interleave 16"),
            ("perplexity", "--chunk 1 -n 3"),
            ("perplexity", "-n 2 --kv-dtype f16 --compute f32")):
        out.append((f"{only} {also}", count(only + ("" if "/" in only else "/")), lack, generate + ["--only", only, "--also", also]))
    for only, also in (("generate", "-n 1"), ("generate", "-n 3 --comm shm --algo alltoall --chunk 64 --interleave 16"), ("generate/smollm2", "-n 4 --comm threads --algo direct --chunk 7"),
                       ("perplexity", "-n 1"), ("perplexity", "-n 5 --comm threads --interleave 16")):
        out.append((f"exact {only} {also}", count(only + ("" if "/" in only else "/")), lack, generate + ["--exact", "--only", only, "--also", also + " --compute f32 --kv-dtype f32"]))
    for n, only, also in ((2, "generate", "--algo direct"), (4, "generate/smollm2", "--algo alltoall --interleave 16 --chunk 64"), (3, "perplexity", "")):
        out.append((f"Open MPI {only} -n {n} {also}", count(only + ("" if "/" in only else "/")), lack or mpi(OPEN_MPI), generate + ["--launch", OPEN_MPI.format(n=n), "--only", only, "--also", also]))
    out.append(("MPICH generate/smollm2-chat -n 2", 1, lack or mpi(MPICH), generate + ["--launch", MPICH.format(n=2), "--only", "generate/smollm2-chat"]))
    return out


def run_ctest(build, only, sums):
    report = os.path.join(os.path.abspath(build), "ctest.xml")
    command = ["ctest", "--test-dir", build, "--output-on-failure", "-j", str(os.cpu_count() or 1), "--output-junit", report] + (["-R", only] if only else [])
    if os.path.exists(report):
        os.remove(report)
    print("==", " ".join(command), flush=True)
    subprocess.run(command)
    if not os.path.exists(report):
        sums.failed += 1
        sums.failures.append("ctest wrote no report")
        return
    for case in xml.parse(report).getroot().iter("testcase"):
        text = case.findtext("system-out") or ""
        status = case.get("status")
        # Single tests that a program skipped: cmocka's and unittest's way of saying so.
        for line in re.findall(r"^\[  SKIPPED \] +(\d+) test", text, re.M):
            sums.skip(int(line), f"{case.get('name')}: {(re.findall(r'^skip.*$', text, re.M | re.I) or ['no reason given'])[0]}")
        for reason in re.findall(r"\.\.\. skipped '(.*)'$", text, re.M):
            sums.skip(1, f"{case.get('name')}: {reason}")
        if status == "run":
            sums.passed += 1
        elif case.find("skipped") is not None and (status == "notrun" and "SKIP" in (case.find("skipped").get("message") or "")):
            reason = re.search(r"^skip.*$", text, re.M | re.I)
            sums.skip(1, f"{case.get('name')}: {reason.group(0) if reason else 'skipped itself'}")
        else:
            sums.failed += 1
            sums.failures.append(f"ctest {case.get('name')}")


def run_golden(name, n, why, command, sums):
    if why:
        sums.skip(n, why)
        print(f"== {name}: skipped, {why}", flush=True)
        return
    begin = time.time()
    p = subprocess.run(command, capture_output=True, text=True)
    last = re.findall(r"^(\d+) passed, (\d+) failed$", p.stdout, re.M)
    passed, failed = (int(x) for x in last[-1]) if last else (0, 1)
    if p.returncode and not failed:
        failed = 1
    sums.passed += passed
    sums.failed += failed
    print(f"== {name}: {passed} passed, {failed} failed, {time.time() - begin:.0f} s", flush=True)
    if failed:
        sums.failures.append(name)
        print(p.stdout[-4000:] + p.stderr[-2000:], flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("build")
    ap.add_argument("--quick", action="store_true", help="ctest alone")
    ap.add_argument("--only", default="")
    ap.add_argument("--list", action="store_true")
    a = ap.parse_args()
    exe = os.path.abspath(os.path.join(a.build, "dcp-attn"))
    commands = [] if a.quick else [c for c in golden_commands(exe) if a.only in c[0]]
    if a.list:
        for c in commands:
            print(c[0])
        return 0
    sums = Sums()
    if not a.only or a.quick:
        run_ctest(a.build, a.only, sums)
    for c in commands:
        run_golden(*c, sums)
    print()
    for why, n in sums.reasons.items():
        print(f"skipped {n}: {why}")
    for f in sums.failures:
        print(f"failed: {f}")
    print(f"{sums.passed} passed, {sums.failed} failed, {sums.skipped} skipped")
    return 1 if sums.failed or not sums.passed else 0


if __name__ == "__main__":
    sys.exit(main())
