#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every test there is, on a build: ctest, then the golden cases with the combinations of options that matter, each pair at least once.

  run.py BUILD [--quick] [--long] [--strict] [--jobs N] [--only SUBSTRING] [--list]

Needs python3 and numpy. Golden cases on real models need the models in the cache (scripts/fetch-model.sh); where they or an MPI are missing,
the cases are skipped, counted, and the reason is printed. With --strict (or DCP_STRICT=1; .ci/run does) what the machine should have and has
not is a failure: a model, an MPI, an instruction set that the CPU has and the build does not use, a test that skips itself without one of the
few good reasons. --long adds combinations that repeat pairs. Last line 'N passed, N failed, N skipped'; exits 1 if any failed."""
import argparse, concurrent.futures, json, os, re, shutil, subprocess, sys, tempfile, time
import xml.etree.ElementTree as xml

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "golden")
OPEN_MPI = "mpirun.openmpi --allow-run-as-root --oversubscribe -n {n}"
MPICH = "mpirun.mpich -n {n}"
WIRE = {"DCP_ATTN_MPI_SHARED": "0"}  # as between hosts: nothing is shared, all goes through MPI
# Skips that even --strict lets pass: what the kernel or the file system of a good machine may refuse, and other CPUs' kernels.
GOOD_REASONS = re.compile(r"sparse mapping|/dev/full|this CPU has no|above this CPU's level|sanitizer's library")


class Sums:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0
        self.failures, self.reasons = [], {}
        self.strict = False

    def fail(self, n, why):
        self.failed += n
        self.failures.append(why)

    def skip(self, n, why):
        if self.strict and not GOOD_REASONS.search(why):
            self.fail(n, f"skipped, which --strict forbids: {why}")
            return
        self.skipped += n
        self.reasons[why] = self.reasons.get(why, 0) + n


def models_folder():
    base = os.environ.get("DCP_ATTN_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dcp-attn")
    return os.path.join(base, "models")


def ranks_of(kind, case):
    c = json.load(open(os.path.join(GOLDEN, kind, case, "case.json")))
    return c["ranks"] if kind == "merge" else int(c["args"][c["args"].index("-n") + 1])


def small_cases(folder, limit):
    """A folder of links to the merge and attend cases of up to limit ranks; how many of each kind there are."""
    n = {}
    for kind in ("merge", "attend"):
        os.makedirs(os.path.join(folder, kind))
        cases = [c for c in os.listdir(os.path.join(GOLDEN, kind)) if ranks_of(kind, c) <= limit]
        for case in cases:
            os.symlink(os.path.join(GOLDEN, kind, case), os.path.join(folder, kind, case))
        n[kind] = len(cases)
    return n


def golden_commands(exe, long, folder):
    """(name, how many cases if skipped, why skipped or None, command, more environment) in order."""
    check = [sys.executable, os.path.join(GOLDEN, "check.py"), exe]
    generate = [sys.executable, os.path.join(GOLDEN, "check_generate.py"), exe, "--models", models_folder()]
    out = []

    def add(name, cases, why, command, env=None):
        out.append((name, cases, why, command, env or {}))

    def count(only):
        """Cases whose name holds the text, as the two scripts choose them."""
        only += "" if "/" in only else "/"
        return sum(only in f"{kind}/{case}" for kind in ("merge", "attend", "generate", "perplexity") for case in os.listdir(os.path.join(GOLDEN, kind)))

    cases = count("merge") + count("attend")

    def mpi(command):
        return None if shutil.which(command.split()[0]) else f"no {command.split()[0]}"

    for comm, algo in (("threads", "direct"), ("threads", "alltoall"), ("threads", "allreduce"), ("shm", "direct"), ("shm", "alltoall"), ("shm", "allreduce"), ("shm", "auto")):
        add(f"golden --comm {comm} --algo {algo}", cases, None, check + ["--also", f"--comm {comm} --algo {algo}"])
    for isa in ("scalar", "avx2"):
        add(f"golden --comm threads --isa {isa}", cases, None, check + ["--also", f"--comm threads --isa {isa}"])
    # Open MPI starts slowly where ranks outnumber cores, so each half of the cases meets each algorithm and each way of moving bytes once.
    small = small_cases(folder, 4)
    for algo, only, wire in (("direct", "merge", 0), ("alltoall", "attend", 0), ("alltoall", "merge", 1), ("allreduce", "attend", 1), ("auto", "attend", 1),
                             ("direct", "attend", 2), ("alltoall", "merge", 2), ("allreduce", "merge", 2), ("allreduce", "attend", 2), ("auto", "merge", 2),
                             ("alltoall", "attend", 3), ("allreduce", "merge", 3), ("auto", "merge", 3)):
        if wire >= 2 and not long:
            continue
        some = ["--cases", folder] if wire % 2 else []
        add(f"golden Open MPI{' wire' if wire % 2 else ''} {only} --algo {algo}", small[only] if wire % 2 else count(only), mpi(OPEN_MPI),
            check + some + ["--launch", OPEN_MPI, "--only", only + "/", "--also", f"--algo {algo}"], WIRE if wire % 2 else None)
    # MPICH polls: more ranks than cores would crawl, so its cases are those of one and two ranks.
    for case in ("merge/one-rank", "merge/two-ranks", "merge/published-base-example"):
        if os.path.isdir(os.path.join(GOLDEN, case)) and ranks_of("merge", case.split("/")[1]) <= 2:
            add(f"golden MPICH {case}", count(case), mpi(MPICH), check + ["--launch", MPICH, "--only", case])

    lack = [m for m in ("smollm2-135m", "gemma3-270m") if not os.path.exists(os.path.join(models_folder(), m + ".gguf"))]
    lack = f"no model {' and '.join(lack)}; scripts/fetch-model.sh fetches them" if lack else None
    # A process for each text; tests/text has all of them in one process, so some are enough here.
    add("tokenize", 156 if long else 40, lack, generate + ["--only", "tokenize/" if long else "/0"])
    # Pairs of ranks, transport, algorithm, chunk and interleave; chunks of 1 and 7 on the short prompts. True: only with --long.
    for only, also, late in (
            ("generate", "-n 1", False),
            ("generate", "-n 2 --comm shm --algo direct --chunk 512 --interleave 16", True),
            ("generate", "-n 3 --comm threads --algo alltoall --chunk 64 --interleave 1", False),
            ("generate", "-n 4 --comm shm --algo alltoall --chunk 512 --interleave 1", False),
            ("generate", "-n 5 --comm threads --algo direct --chunk 512 --interleave 16", True),
            ("generate", "-n 8 --comm shm --algo direct --chunk 64 --interleave 16", False),
            ("generate/smollm2-chat", "-n 3 --comm shm --algo alltoall --chunk 7 --interleave 16", False),
            ("generate/smollm2-chat", "-n 2 --comm shm --algo direct --chunk 512 --interleave 16", False),
            ("generate/gemma3-raw", "-n 4 --comm threads --algo direct --chunk 1 --interleave 1", False),
            ("generate/smollm2-raw", "-n 5 --comm shm --algo allreduce --chunk 1 --interleave 16", False),
            ("generate/smollm2-one-token", "-n 8 --comm threads --algo alltoall --chunk 7 --interleave 1", False),
            ("perplexity", "-n 1", True),
            ("perplexity", "-n 4 --comm shm --chunk 64 --interleave 16", False),
            ("perplexity", "--chunk 1 -n 3", True),
            ("perplexity", "-n 2 --kv-dtype f16 --compute f32", False)):
        if long or not late:
            add(f"{only} {also}", count(only), lack, generate + ["--only", only, "--also", also])
    for only, also, late in (
            ("generate", "-n 1", True),
            ("generate", "-n 3 --comm shm --algo alltoall --chunk 64 --interleave 16", False),
            ("generate/smollm2", "-n 4 --comm threads --algo direct --chunk 7", True),
            ("perplexity", "-n 1", False),
            ("perplexity", "-n 5 --comm threads --interleave 16", False)):
        if long or not late:
            add(f"exact {only} {also}", count(only), lack, generate + ["--exact", "--only", only, "--also", also + " --compute f32 --kv-dtype f32"])
    for n, only, also, wire, late in (
            (2, "generate/gemma3-raw", "--algo direct", False, False),
            (4, "generate/smollm2-chat", "--algo alltoall --interleave 16 --chunk 64", True, False),
            (2, "generate", "--algo direct", False, True),
            (4, "generate/smollm2", "--algo alltoall --interleave 16 --chunk 64", False, True),
            (3, "generate/smollm2", "--algo auto", True, True),
            (3, "perplexity", "", False, True)):
        if long or not late:
            add(f"Open MPI{' wire' if wire else ''} {only} -n {n} {also}", count(only), lack or mpi(OPEN_MPI),
                generate + ["--launch", OPEN_MPI.format(n=n), "--only", only, "--also", also], WIRE if wire else None)
    add("MPICH generate/smollm2-chat -n 2", 1, lack or mpi(MPICH), generate + ["--launch", MPICH.format(n=2), "--only", "generate/smollm2-chat"])
    return out


def check_machine(build, exe, sums):
    """What --strict expects of the build: the kernels of the highest instruction set that the CPU has, and both MPI modules."""
    cache = open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8").read()
    on = {name: value == "ON" for name, value in re.findall(r"^(DCP_\w+):BOOL=(\w+)$", cache, re.M)}
    if not os.path.exists(exe):
        if on.get("DCP_ENGINE"):
            sums.fail(1, f"there is no {exe}")
        return
    p = subprocess.run([exe, "info", "--json"], capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "DCP_ATTN_ISA"})
    try:
        info = json.loads(p.stdout)
    except ValueError:
        sums.fail(1, f"`info --json` gave no object: {p.stderr.strip()[-200:]}")
        return
    flags = set(re.search(r"^flags\s*:(.*)$", open("/proc/cpuinfo", encoding="utf-8").read() + "\nflags :", re.M).group(1).split())
    best = "scalar"
    if on.get("DCP_AVX2") and {"avx2", "fma", "f16c"} <= flags:
        best = "avx2"
        if on.get("DCP_AVX512") and {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"} <= flags:
            best = "avx512"
    order = ["scalar", "avx2", "avx512", "amx"]
    if order.index(info["isa"]) < order.index(best):
        sums.fail(1, f"this CPU has {best}, and the build uses {info['isa']}: {info.get('why_not_higher')}")
    else:
        sums.passed += 1
    if on.get("DCP_MPI"):
        for name in ("openmpi", "mpich"):
            if any(m["name"] == name and m["loads"] for m in info["groups"]["mpi"]):
                sums.passed += 1
            else:
                sums.fail(1, f"the module of {name} is missing or does not load")


def run_ctest(build, only, long, sums):
    report = os.path.join(os.path.abspath(build), "ctest.xml")
    command = ["ctest", "--test-dir", build, "--output-on-failure", "--test-output-size-passed", "200000", *(["-C", "Long"] if long else []), "-j", str(os.cpu_count() or 1), "--output-junit", report] + (["-R", only] if only else [])
    if os.path.exists(report):
        os.remove(report)
    print("==", " ".join(command), flush=True)
    subprocess.run(command)
    if not os.path.exists(report):
        sums.fail(1, "ctest wrote no report")
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
            sums.fail(1, f"ctest {case.get('name')}")


def run_golden(entry):
    """(output, passed, failed) of a command."""
    name, _, _, command, env = entry
    begin = time.time()
    p = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    last = re.findall(r"^(\d+) passed, (\d+) failed$", p.stdout, re.M)
    passed, failed = (int(x) for x in last[-1]) if last else (0, 1)
    if p.returncode and not failed:
        failed = 1
    text = f"== {name}: {passed} passed, {failed} failed, {time.time() - begin:.0f} s"
    return text + ("\n" + p.stdout[-4000:] + p.stderr[-2000:] if failed else ""), passed, failed


def run_all_golden(commands, jobs, sums):
    """Side by side: starting processes and waiting for ranks leave cores idle."""
    for name, n, why, _, _ in commands:
        if why:
            sums.skip(n, why)
            print(f"== {name}: skipped, {why}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run_golden, c): c[0] for c in commands if not c[2]}
        for run in concurrent.futures.as_completed(runs):
            text, passed, failed = run.result()
            print(text, flush=True)
            sums.passed += passed
            if failed:
                sums.fail(failed, runs[run])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("build")
    ap.add_argument("--quick", action="store_true", help="ctest alone")
    ap.add_argument("--long", action="store_true", help="also combinations that repeat pairs")
    ap.add_argument("--strict", action="store_true", default=os.environ.get("DCP_STRICT", "0") not in ("", "0"), help="what is missing is a failure")
    ap.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="golden commands side by side")
    ap.add_argument("--only", default="")
    ap.add_argument("--list", action="store_true")
    a = ap.parse_args()
    exe = os.path.abspath(os.path.join(a.build, "dcp-attn"))
    sums = Sums()
    sums.strict = a.strict
    with tempfile.TemporaryDirectory() as folder:
        commands = [] if a.quick else [c for c in golden_commands(exe, a.long, folder) if a.only in c[0]]
        if a.list:
            for c in commands:
                print(c[0])
            return 0
        if a.strict:
            check_machine(a.build, exe, sums)
        if not a.only or a.quick:
            run_ctest(a.build, a.only, a.long, sums)
        run_all_golden(commands, max(1, a.jobs), sums)
    print()
    for why, n in sums.reasons.items():
        print(f"skipped {n}: {why}")
    for f in sums.failures:
        print(f"failed: {f}")
    print(f"{sums.passed} passed, {sums.failed} failed, {sums.skipped} skipped")
    return 1 if sums.failed or not sums.passed else 0


if __name__ == "__main__":
    sys.exit(main())
