#!/usr/bin/env python3
"""Run `dcp-attn merge` and `dcp-attn attend` on the golden cases and compare with float64 expectations.

  check.py PATH/TO/dcp-attn [--cases DIR] [--only SUBSTRING] [--also "--comm threads"] [--launch "mpirun --oversubscribe -n {n}"]

With --launch every call is started by that command, {n} replaced by the case's number of ranks, and an option -n of the case is dropped: the MPI world is the group.

Needs python3 and numpy. Prints a line per case that fails, last a line 'N passed, N failed'; exits 1 if any failed.
Every call has --json, whose object is compared too.
Cases: merge/<name>/ rank<r>.safetensors [sink.safetensors] expect.safetensors case.json
       attend/<name>/ in.safetensors expect.safetensors case.json
"""
import argparse, json, os, shlex, struct, subprocess, sys, tempfile
import numpy as np

DT = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}


def load(path):
    d = open(path, "rb").read()
    n = struct.unpack("<Q", d[:8])[0]
    out = {}
    for k, v in json.loads(d[8:8 + n]).items():
        if k == "__metadata__":
            continue
        a, b = v["data_offsets"]
        x = np.frombuffer(d[8 + n + a:8 + n + b], dtype=DT[v["dtype"]]).reshape(v["shape"])
        if v["dtype"] == "BF16":
            x = (x.astype(np.uint32) << 16).view(np.float32)
        out[k] = x.astype(np.float64)
    return out


def dtypes(path):
    d = open(path, "rb").read()
    n = struct.unpack("<Q", d[:8])[0]
    return {k: v["dtype"] for k, v in json.loads(d[8:8 + n]).items() if k != "__metadata__"}, {k: v["shape"] for k, v in json.loads(d[8:8 + n]).items() if k != "__metadata__"}


def owned(length, n, interleave):
    """Keys of 0..length-1 that each of n ranks owns when (p // interleave) % n owns p."""
    return [sum(1 for p in range(length) if (p // interleave) % n == r) for r in range(n)]


def same(got, want, rtol, atol):
    """None if equal within tolerance, else what differs. NaN and infinities must stand at the same places."""
    if got.shape != want.shape:
        return f"shape {got.shape}, want {want.shape}"
    fin = np.isfinite(want)
    if not np.array_equal(np.isnan(got), np.isnan(want)) or not np.array_equal(got[~fin & ~np.isnan(want)], want[~fin & ~np.isnan(want)]):
        return "NaN or infinity at another place"
    zero = fin & (want == 0)
    if np.any(got[zero] != 0) and atol < 1e-3 and np.any(np.abs(got[zero]) > atol):
        return "a value that must be 0 is not"
    err = np.abs(got[fin] - want[fin]) - atol - rtol * np.abs(want[fin])
    if err.size and err.max() > 0:
        i = np.argwhere(fin)[int(err.argmax())]
        return f"at {tuple(int(x) for x in i)}: got {got[tuple(i)]!r}, want {want[tuple(i)]!r}"
    return None


def own_words(stderr):
    """What the command said, without what a launcher adds; or the end of all."""
    own = [line for line in stderr.splitlines() if line.startswith("dcp-attn")]
    return "; ".join(own)[:600] if own else stderr.strip()[-200:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("bin")
    ap.add_argument("--cases", default=os.path.dirname(os.path.abspath(__file__)))
    ap.add_argument("--only", default="")
    ap.add_argument("--also", default="", help="more options for every merge and attend call")
    ap.add_argument("--launch", default="", help="command that starts each call, such as \"mpirun --oversubscribe -n {n}\"")
    ap.add_argument("--timeout", type=float, default=60)
    a = ap.parse_args()
    ok = bad = 0
    for kind in ("merge", "attend"):
        base = os.path.join(a.cases, kind)
        for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
            if a.only not in f"{kind}/{name}":
                continue
            d = os.path.join(base, name)
            c = json.load(open(os.path.join(d, "case.json")))
            files = [f"rank{r}.safetensors" for r in range(c["ranks"])] if kind == "merge" else ["in.safetensors"]
            with tempfile.TemporaryDirectory() as tmp:
                dst = os.path.join(tmp, "got.safetensors")
                args = list(c["args"])
                n = c["ranks"] if kind == "merge" else int(args[args.index("-n") + 1])
                if a.launch and kind == "attend":
                    del args[args.index("-n"):args.index("-n") + 2]
                cmd = shlex.split(a.launch.replace("{n}", str(n))) + [os.path.abspath(a.bin), kind] + args + shlex.split(a.also) + ["--json", "-o", dst] + files
                why = None
                try:
                    p = subprocess.run(cmd, cwd=d, capture_output=True, text=True, timeout=a.timeout)
                    if p.returncode:
                        why = f"exit {p.returncode}: {own_words(p.stderr)}"
                    else:
                        said = json.loads(p.stdout)
                        what = dict(c.get("json", {}), **({"ranks": n} if kind == "merge" else {}))
                        if kind == "attend":
                            step = int(args[args.index("--interleave") + 1]) if "--interleave" in args else 1
                            what["rank_keys"] = owned(dtypes(os.path.join(d, "in.safetensors"))[1]["k"][0], n, step)
                        for key, v in what.items():
                            if said.get(key) != v:
                                why = why or f"--json says {key} = {said.get(key)}, want {v}"
                except ValueError:
                    why = "stdout with --json is not one JSON object"
                except subprocess.TimeoutExpired:
                    why = "no answer in time"
                if why is None and not os.path.exists(dst):
                    why = "no output file"
                if why is None:
                    got, want = load(dst), load(os.path.join(d, "expect.safetensors"))
                    types = dtypes(dst)[0]
                    wide = "F32" if kind == "attend" or "--out-dtype" in cmd else dtypes(os.path.join(d, files[0]))[0]["out"]
                    if types.get("lse") != "F32" or ("--out-dtype" not in cmd and types.get("out") != wide):
                        why = f"types are {types}, want out {wide} and lse F32"
                    for key, tag in (("out", ""), ("lse", "lse_")):
                        w = same(got[key], want[key], c.get(tag + "rtol", c["rtol"]), c.get(tag + "atol", c["atol"])) if key in got else "missing"
                        why = why or (w and f"{key}: {w}")
                    if not why and np.any(got["out"][np.isneginf(want["lse"])] != 0):
                        why = "a row without any key is not exactly 0"
            if why:
                bad += 1
                print(f"{kind}/{name}: {why}\n    {shlex.join(cmd)}")
            else:
                ok += 1
    print(f"{ok} passed, {bad} failed")
    return 1 if bad or not ok else 0


if __name__ == "__main__":
    sys.exit(main())
