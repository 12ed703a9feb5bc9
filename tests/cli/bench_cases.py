# SPDX-License-Identifier: Apache-2.0
"""Tests of `bench merge` and `merge --compare`; test_cli.py runs them."""
import json, math, os, random, re, shutil, struct, subprocess, tempfile, unittest

from tensor_files import write

EXE = None  # set by test_cli.py


def run(*args, env=None, timeout=120):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
    clean.update(env or {})
    p = subprocess.run([EXE, *args], capture_output=True, text=True, env=clean, timeout=timeout)
    return p.returncode, p.stdout, p.stderr


def mpi_runs(*args):
    """mpirun with args, of each MPI that there is: exit code, stdout, stderr."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
    # Under the sanitizer: what MPI itself never frees is no fault of ours.
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", ASAN_OPTIONS="detect_leaks=0")
    for name, mpirun in (("openmpi", ["mpirun.openmpi", "--oversubscribe"]), ("mpich", ["mpirun.mpich"])):
        if shutil.which(mpirun[0]) and os.path.exists(os.path.join(os.path.dirname(EXE), f"libdcpattn_mpi_{name}.so")):
            p = subprocess.run([*mpirun, *args], capture_output=True, text=True, timeout=120, env=env)
            yield p.returncode, p.stdout, p.stderr


ROW = {"shape", "ranks", "comm", "algo", "dtype", "in_place", "time_us", "read_time_ratio", "speedup", "speedup_mpi", "workspace_bytes",
       "peak_extra_bytes", "wrong"}


class Bench(unittest.TestCase):
    def bench(self, *args):
        rc, out, err = run("bench", "merge", "--json", "--iters", "3", *args)
        self.assertEqual(rc, 0, err)
        said = json.loads(out)
        self.assertGreater(said["machine"]["read_GBps"], 0)
        for row in said["rows"]:
            self.assertLessEqual(ROW, set(row))
            self.assertEqual(row["wrong"], 0, row)
            self.assertLessEqual(row["time_us"]["min"], row["time_us"]["median"])
            self.assertGreater(row["speedup"], 0)
            self.assertGreater(row["read_time_ratio"], 0)
            if not row["algo"].startswith("allreduce"):
                self.assertLessEqual(row["peak_extra_bytes"], (8 << 20) + (1 << 20))
        return said["rows"]

    def test_shapes_types_ranks(self):
        for comm in ("shm", "threads"):
            for n in (1, 2, 3):
                rows = self.bench("--comm", comm, "-n", str(n), "--shape", "2,5,64;1,3,7", "--dtype", "f32,bf16,f16")
                self.assertEqual({(tuple(r["shape"]), r["dtype"]) for r in rows},
                                 {(s, t) for s in ((2, 5, 64), (1, 3, 7)) for t in ("f32", "bf16", "f16")})
                self.assertLessEqual({"direct", "alltoall", "allreduce"}, {r["algo"] for r in rows})
                self.assertEqual({(r["ranks"], r["comm"], r["in_place"], r["speedup_mpi"]) for r in rows}, {(n, comm, False, None)})

    def test_in_place_and_cuts(self):
        for args in (("--in-place",), ("--in-place", "--cut", "tokens"), ("--cut", "tokens"), ("--cut", "none")):
            rows = self.bench("-n", "2", "--shape", "3,4,32", *args)
            self.assertEqual({r["in_place"] for r in rows}, {"--in-place" in args})

    def test_order_and_wire(self):
        """As of merge: rank order leaves others out, and the type of messages is of alltoall alone."""
        self.assertIn("halving", {r["algo"] for r in self.bench("-n", "2", "--shape", "3,4,32", "--order", "any")})
        rows = self.bench("-n", "3", "--comm", "threads", "--shape", "3,4,32", "--order", "rank", "--wire-dtype", "bf16")
        self.assertEqual({r["algo"]: (r["order"], r["wire_dtype"]) for r in rows if r["algo"][:9] != "allreduce"},
                         {"direct": ("rank", "none"), "alltoall": ("rank", "bf16")})
        self.assertEqual({(r["order"], r["wire_dtype"]) for r in rows if r["algo"][:9] == "allreduce"}, {("transport's", "f32")})
        rows = self.bench("-n", "2", "--shape", "3,4,32", "--dtype", "f32,f16", "--wire-dtype", "f16", "--algo", "alltoall")
        self.assertEqual({r["dtype"]: r["wire_dtype"] for r in rows if r["algo"] == "alltoall"}, {"f32": "f16", "f16": "f16"})
        _, text, _ = run("bench", "merge", "-n", "4", "--shape", "1,4,4", "--algo", "alltoall", "--wire-dtype", "bf16", "--time", "0.01",
                         env={"DCP_ATTN_RANKS_PER_HOST": "2"})
        self.assertTrue(text.startswith("4 ranks of 2 hosts, shm"), text)
        self.assertIn("alltoall sends bf16", text)

    def test_sizes(self):
        rows = self.bench("-n", "2", "--algo", "direct", "--min-bytes", "4K", "--max-bytes", "64K", "--factor", "4", "--heads", "4", "--dim", "64")
        self.assertEqual([r["shape"][0] for r in rows if r["algo"] == "direct"], [4, 16, 64])
        self.assertEqual({r["algo"] for r in rows} - {"direct"}, {r["algo"] for r in rows if r["algo"].startswith("allreduce")})

    def test_memory_only(self):
        rc, out, err = run("bench", "merge", "--json", "--iters", "0", "-n", "2", "--shape", "64,8,64", "--dtype", "bf16")
        self.assertEqual(rc, 0, err)
        for row in json.loads(out)["rows"]:
            self.assertIsNone(row["time_us"]["min"])
            self.assertGreater(row["workspace_bytes"], 0)

    def test_table(self):
        rc, out, err = run("bench", "merge", "--iters", "2", "-n", "2", "--shape", "1,2,8")
        self.assertEqual(rc, 0, err)
        for word in ("x read", "speedup", "work", "direct", "wrong", "plain read"):
            self.assertIn(word, out)
        self.assertLessEqual(max(len(line) for line in out.splitlines()), 100)
        self.assertIn("2 ranks, ", out)
        self.assertNotIn("merges nothing", out)

    def test_one_rank_compares_nothing(self):
        args = ("bench", "merge", "--iters", "2", "--shape", "1,2,8")
        rc, out, err = run(*args)
        self.assertEqual((rc, err), (0, ""))
        self.assertTrue(out.startswith("1 rank, "), out)
        self.assertIn("one rank merges nothing, it copies: -n 2 or more compares", out)
        head, direct = next(line for line in out.splitlines() if "speedup" in line), next(line for line in out.splitlines() if line.split()[:1] == ["direct"])
        self.assertEqual(direct[:head.index("speedup") + len("speedup")].split()[-1], "-", out)
        rc, out, err = run(*args, "--json")
        self.assertEqual(rc, 0)
        self.assertEqual(err, "dcp-attn bench merge: one rank merges nothing, it copies: -n 2 or more compares\n")
        self.assertEqual({r["ranks"] for r in json.loads(out)["rows"]}, {1})

    def test_short_of_memory(self):
        """A rank that lacks memory says of what, once; nobody meets another's call, and all leave together."""
        for words, limit, lacks in ((("merge", "--shape", "8,4,64", "--iters", "1"), "150K", "times"),
                                    (("attend", "--case", "gqa-decode", "--keys", "4096", "--iters", "1"), "40K", "times"),
                                    (("attend", "--case", "gqa-decode", "--keys", "4096", "--iters", "1", "--cold", "1"), "9300K", "times"),
                                    (("product", "--iters", "1", "--product-bytes", "1M"), "1200K", "[a-zA-Z0-9 ]+"),
                                    (("product", "--iters", "1"), "2M", "weights of a bench")):
            case = (EXE, "bench", *words)
            for rc, out, err in mpi_runs("-n", "1", *case, ":", "-n", "1", "env", "DCP_ATTN_MEMORY_LIMIT=" + limit, *case):
                self.assertNotEqual(rc, 0)
                self.assertRegex(err, rf"dcp-attn: rank 1: {lacks}: \d+ bytes wanted")
                self.assertEqual(err.count("dcp-attn: "), 1, err)
                self.assertNotIn("abort(", err.lower())

    def test_short_at_creation(self):
        """No group to agree in: the rank of the cause is heard all the same, before the world ends."""
        case = (EXE, "bench", "product", "--iters", "1")
        for limit in ["8K"] * 5:
            for rc, out, err in mpi_runs("-n", "1", *case, ":", "-n", "1", "env", "DCP_ATTN_MEMORY_LIMIT=" + limit, *case):
                self.assertNotEqual(rc, 0)
                self.assertRegex(err, r"dcp-attn: rank 1: [a-z ]+: \d+ bytes wanted")

    def test_read_of_more_ranks_than_cpus(self):
        """Ranks that take turns on the CPUs read no faster than as many ranks as there are CPUs: a read is timed until the last has ended."""
        cpus = sorted(os.sched_getaffinity(0))[:2]
        for comm in ("shm", "threads"):
            best = {len(cpus): 0, 8: 0}
            for n in [*best] * 2:
                env = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_")}
                p = subprocess.run([EXE, "bench", "merge", "--json", "--comm", comm, "-n", str(n), "--shape", "64,96,512", "--iters", "8", "--algo",
                                    "direct"], capture_output=True, text=True, env=env, timeout=120, preexec_fn=lambda: os.sched_setaffinity(0, cpus))
                self.assertEqual(p.returncode, 0, p.stderr)
                best[n] = max(best[n], json.loads(p.stdout)["machine"]["read_GBps"])
            self.assertLess(best[8], 1.5 * best[len(cpus)], comm)

    def test_usage(self):
        for args, word in ((["--shape", "1,2"], "--shape"), (["--shape", "1,0,3"], "--shape"), (["--dtype", "f64"], "'f64'"),
                           (["--algo", "fast"], "'fast'"), (["--in-place", "--cut", "none"], "--in-place"),
                           (["--min-bytes", "2M", "--max-bytes", "1M"], "--max-bytes"), (["--shape", "999999999999,999999,999999"], "T x H x D"),
                           (["--shape", "1,4,4;"], "'1,4,4;'"), (["--shape", ";1,4,4"], "';1,4,4'"), (["--algo", "direct,"], "'direct,'"),
                           (["--order", "rank", "--algo", "direct,halving"], "--order rank: --algo halving sums"), (["--order", "fast"], "'fast'"),
                           (["--wire-dtype", "bf16", "--dtype", "f32,f16"], "--wire-dtype bf16 is neither the type of partials (--dtype f16) nor narrower"),
                           (["--wire-dtype", "f32", "--dtype", "bf16"], "--wire-dtype f32"), (["--algo", "direct,,alltoall"], "''"), (["--dtype", "f32,"], "'f32,'"), (["--dtype", ",f32"], "',f32'"),
                           (["--shape", "9999999999999999999,4,4"], "T is 9999999999999999999"), (["--shape", "9999999999999,4,4"], "T is 9999999999999;"),
                           (["--shape", "1,0,4"], "H is 0"), (["--shape", "1,4,4", "--heads", "4"], "--heads"), (["--shape", "1,4,4", "--factor", "2"], "--factor")):
            rc, out, err = run("bench", "merge", *args)
            self.assertEqual((rc, out), (2, ""), err)
            self.assertIn(word, err)
        self.assertEqual(run("bench")[0], 2)
        self.assertEqual(run("bench", "walk")[0], 2)
        said = run("bench")[2]
        self.assertEqual(run("bench", "--help"), (0, said, ""))
        for name in ("merge", "attend", "extend", "product", "oom", "generate"):
            self.assertIn(name, said)
            self.assertIn(name, re.search(r"^  bench((.|\n   )*)", run("--help")[1], re.M).group(1))
        for rc, out, err in mpi_runs("-n", "2", EXE, "bench", "--help"):
            self.assertEqual((rc, out.count("Usage:")), (0, 1), err)
        self.assertIn("busbw", run("bench", "merge", "--help")[1])


def bf16(x):
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.unpack("<f", struct.pack("<I", (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000))[0]


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


T, H, D, N = 5, 3, 8, 3


class Compare(unittest.TestCase):
    """The other result is made here, in double, with the mistake that must be recognised."""

    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)
        rng = random.Random(20261129)
        self.out = [[f32(rng.uniform(-2, 2)) for _ in range(T * H * D)] for _ in range(N)]
        self.lse = [[f32(rng.uniform(-3, 3)) for _ in range(T * H)] for _ in range(N)]
        self.sink = [f32(rng.uniform(-1, 1)) for _ in range(H)]

    def path(self, name):
        return os.path.join(self.dir, name)

    def partials(self, **more):
        files = []
        for r in range(N):
            files.append(self.path(f"rank{r}.safetensors"))
            write(files[-1], out=("F32", [T, H, D], self.out[r]), lse=("F32", [T, H], self.lse[r]), **{k: v[r] for k, v in more.items()})
        return files

    def merged(self, power=math.exp, log=math.log, lse=None, out=None, weight=None, sink=0.0, counts=None):
        lse, out = lse or self.lse, out or self.out
        counts = counts or [1.0] * len(out)
        merged, merged_lse = [], []
        for row in range(T * H):
            e = [c * power(x[row]) if math.isfinite(x[row]) else 0.0 for x, c in zip(lse, counts)]
            total = sum(e) + sink * power(self.sink[row % H])
            w = [x / total for x in e] if weight is None else [weight] * len(e)
            for d in range(D):
                merged.append(sum(x * o[row * D + d] for x, o in zip(w, out) if x > 0))
            merged_lse.append(log(sum(e)))
        return merged, merged_lse

    def compare(self, result, *args, files=None, with_lse=True):
        other = self.path("other.safetensors")
        tensors = {"out": ("F32", [T, H, D], result[0])}
        if with_lse:
            tensors["lse"] = ("F32", [T, H], result[1])
        write(other, **tensors)
        args = ["merge", "--lse-base", "e", "--compare", other, *args, *(files or self.partials())]
        rc, out, err = run(*args, "--json")
        self.assertEqual(err, "")
        said = json.loads(out)["compare"]
        self.assertEqual(rc, 0 if said["within"] else 1)
        rc_text, text, _ = run(*args)
        self.said = text
        self.assertEqual(rc_text, rc)
        for g in said["guesses"]:
            self.assertIn("likely: " + g, text)
        return said

    def text(self, result, *args, **more):
        self.compare(result, *args, **more)
        return self.said

    def guessed(self, words, result, *args, **more):
        said = self.compare(result, *args, **more)
        self.assertFalse(said["within"])
        self.assertTrue(any(words in g for g in said["guesses"]), said)
        return said

    def test_agrees(self):
        for cut in ("heads", "tokens", "none"):
            for comm in ("shm", "threads"):
                said = self.compare(self.merged(), "--cut", cut, "--comm", comm)
                self.assertTrue(said["within"], said)
                self.assertEqual((said["beyond"], said["lse_beyond"], said["guesses"]), (0, 0, []))
                self.assertAlmostEqual(sum(said["weights"]), 1.0, 6)

    def test_rounded_messages(self):
        """What --wire-dtype rounds is allowed for; with a tolerance that does not, it is named."""
        wire = ("--algo", "alltoall", "--wire-dtype", "bf16")
        self.assertTrue(self.compare(self.merged(), *wire)["within"])
        self.guessed("messages in bf16, which round more than --rtol allows", self.merged(), *wire, "--rtol", "1e-6")
        said = self.compare(self.merged(), "--algo", "direct", "--wire-dtype", "bf16")
        self.assertEqual((said["within"], said["rtol"]), (True, 1e-5))

    def test_lse_of_a_coarse_result(self):
        """LSEs in F32 are held to F32 whatever the type of out."""
        merged, lse = self.merged()
        self.assertTrue(self.compare((merged, lse), "--out-dtype", "bf16")["within"])
        said = self.compare((merged, [x + 0.005 for x in lse]), "--out-dtype", "bf16")
        self.assertEqual((said["within"], said["beyond"], said["lse_beyond"]), (False, 0, len(lse)), said)

    def test_no_tokens(self):
        files = [self.path("none0.safetensors"), self.path("none1.safetensors")]
        for f in files:
            write(f, out=("F32", [0, H, D], []), lse=("F32", [0, H], []))
        for args in ((), ("--algo", "alltoall"), ("--cut", "tokens")):
            rc, text, err = run("merge", "--lse-base", "e", "--compare", files[0], *files, *args)
            self.assertEqual(rc, 0, err)
            self.assertIn("agrees", text)

    def test_names_the_worst(self):
        merged, lse = self.merged()
        at = (3 * H + 1) * D + 5
        merged[at] += 0.25
        said = self.compare((merged, lse))
        self.assertFalse(said["within"])
        self.assertEqual((said["out"]["token"], said["out"]["head"], said["out"]["dim"], said["beyond"]), (3, 1, 5, 1))
        self.assertAlmostEqual(said["out"]["error"], 0.25, 5)
        e = [math.exp(self.lse[r][3 * H + 1]) for r in range(N)]
        for r in range(N):
            self.assertAlmostEqual(said["weights"][r], e[r] / sum(e), 6)
            self.assertAlmostEqual(said["lses"][r], self.lse[r][3 * H + 1], 6)
        ulp = 2.0 ** (math.frexp(merged[at])[1] - 24)
        self.assertAlmostEqual(said["out"]["ulps"] * ulp, 0.25, 5)
        self.assertTrue(self.compare((merged, lse), "--atol", "0.3")["within"])
        self.assertTrue(self.compare((merged, lse), "--rtol", "10")["within"])
        self.assertEqual(said["guesses"], [])

    def test_wrong_lse_alone(self):
        merged, lse = self.merged()
        lse[7] += 0.01
        said = self.compare((merged, lse))
        self.assertEqual((said["within"], said["beyond"], said["lse_beyond"]), (False, 0, 1))
        self.assertEqual((said["lse"]["token"], said["lse"]["head"]), (2, 1))
        self.assertEqual(said["guesses"], [])
        self.assertEqual(said["weights_at"], {"token": 2, "head": 1})
        self.assertTrue(said["lse_compared"])
        said = self.compare((merged, lse), with_lse=False)
        self.assertEqual((said["within"], said["lse_compared"], "lse" in said), (True, False, False))
        self.assertIn(f"lse: {self.path('other.safetensors')} has none: not compared\n", self.text((merged, lse), with_lse=False))

    def test_outlier_hides_nothing(self):
        """What is allowed is measured by this run's values: a wild one in the other file must not widen it for its neighbours."""
        merged, lse = self.merged()
        merged[0], merged[1] = 1e6, merged[1] + 0.01
        said = self.compare((merged, lse))
        self.assertEqual(said["beyond"], 2, said)
        lse[1] = 1e9
        self.assertEqual(self.compare((self.merged()[0], lse))["lse_beyond"], 1)

    def test_not_finite(self):
        for value, words in ((math.nan, "NaN there alone"), (math.inf, "infinite there, finite here"), (-math.inf, "infinite there")):
            merged, lse = self.merged()
            merged[4] = value
            merged[9] += 0.5
            said = self.compare((merged, lse))
            self.assertEqual((said["beyond"], said["nonfinite"], said["out"]["dim"], said["out"]["ulps"]), (2, 1, 4, None))
            text = self.text((merged, lse))
            self.assertIn(words, text)
            self.assertIn("1 of them NaN or infinite in one result and not in the other", text)
            self.assertNotRegex(text, r"nan ULPs|inf ULPs|relative (nan|inf)")

    def test_names_the_row_of_the_weights(self):
        merged, lse = self.merged()
        merged[(3 * H + 1) * D] += 0.25
        text = self.text((merged, lse))
        for r in range(N):
            self.assertRegex(text, rf"at token 3, head 1 rank {r} has weight 0\.\d+ \(lse ")

    def test_exit_codes(self):
        """1 says that the results differ and nothing else."""
        merged, lse = self.merged()
        files = self.partials()
        other = self.path("other.safetensors")
        compare = ("merge", "--lse-base", "e", "--compare", other)
        for delta, want in ((0.0, 0), (0.25, 1)):
            write(other, out=("F32", [T, H, D], [x + delta for x in merged]), lse=("F32", [T, H], lse))
            for comm in ("shm", "threads"):
                self.assertEqual(run(*compare, "--comm", comm, *files)[0], want)
            for rc, out, err in mpi_runs("-n", str(N), EXE, *compare, *files):
                self.assertEqual(rc, want, err)
            with open("/dev/null") as unwritable:
                p = subprocess.run([EXE, *compare, *files], stdout=unwritable, stderr=subprocess.PIPE, text=True)
            self.assertEqual(p.returncode, 2, p.stderr)
        for bad in (["--sink", self.path("none")], ["-o", self.path("none/out")], ["--deadline", "x"]):
            rc, _, err = run(*compare, *bad, *files)
            self.assertEqual(rc, 2, err)
        self.assertEqual(run(*compare, files[0], self.path("none"))[0], 2)
        rc, _, err = run(*compare, *files, env={"DCP_ATTN_FAULT": "kill:record:1"})
        self.assertEqual(rc, 2, err)
        rc, _, err = run("merge", "--lse-base", "e", "-o", self.path("out"), files[0], self.path("none"))
        self.assertEqual(rc, 1, err)

    def test_wrong_lse_beside_many_rows(self):
        """The row of the wrong LSE is looked at, however many there are."""
        tokens, dim = 99, 2
        rng, files = random.Random(7), []
        outs, lses = [[[f32(rng.uniform(-2, 2)) for _ in range(n)] for _ in range(2)] for n in (tokens * dim, tokens)]
        for r in range(2):
            files.append(self.path(f"long{r}"))
            write(files[-1], out=("F32", [tokens, 1, dim], outs[r]), lse=("F32", [tokens, 1], lses[r]))
        e = [[math.exp(x) for x in lse] for lse in lses]
        out = [(e[0][i // dim] * outs[0][i] + e[1][i // dim] * outs[1][i]) / (e[0][i // dim] + e[1][i // dim]) for i in range(tokens * dim)]
        for at in range(0, tokens, 7):
            lse = [math.log(x + y) for x, y in zip(*e)]
            lse[at] += 0.5
            write(self.path("long"), out=("F32", [tokens, 1, dim], out), lse=("F32", [tokens, 1], lse))
            rc, text, err = run("merge", "--lse-base", "e", "--json", "--compare", self.path("long"), *files)
            said = json.loads(text)["compare"]
            self.assertEqual((rc, said["beyond"], said["lse_beyond"], said["lse"]["token"], said["guesses"]), (1, 0, 1, at, []), err)

    def test_lse_in_the_other_base(self):
        """Only the LSEs differ: never this run's fault."""
        for base, power, log, words in (("2", lambda x: 2.0 ** x, math.log, "LSEs are in base e"), ("e", math.exp, math.log2, "LSEs are in base 2")):
            said = self.guessed(words, self.merged(power=power, log=log), "--lse-base", base)
            self.assertEqual((said["beyond"], len(said["guesses"])), (0, 1), said)
            self.assertGreater(said["lse_beyond"], 0)

    def test_both_wrong_in_other_rows(self):
        merged, lse = self.merged()
        merged[0] = math.inf
        lse[7] += 1
        said = self.compare((merged, lse))
        self.assertEqual((said["beyond"] > 0, said["lse_beyond"], said["guesses"]), (True, 1, []))

    def test_mistake_with_a_wrong_lse(self):
        merged, lse = self.merged(counts=[1, 2, 1])
        self.guessed("counts rank 1", (merged, [x + 1 for x in lse]))

    def test_other_base(self):
        self.guessed("in base 2", self.merged(power=lambda x: 2.0 ** x, log=math.log2))
        said = self.compare(self.merged(), "--lse-base", "2")
        self.assertTrue(any("in base e" in g for g in said["guesses"]), said)

    def test_transposed_lse(self):
        self.guessed("transposed", self.merged(lse=[[x[h * T + t] for t in range(T) for h in range(H)] for x in self.lse]))

    def test_empty_shard_with_lse_0(self):
        for row in range(0, T * H, 2):
            self.lse[1][row] = -math.inf
            self.out[1][row * D:(row + 1) * D] = [0.0] * D
        zeroed = [[0.0 if x == -math.inf else x for x in lse] for lse in self.lse]
        self.guessed("as 0 instead of -inf", self.merged(lse=zeroed))
        right = self.merged()
        self.lse = zeroed
        self.guessed("left with an LSE of 0", right)

    def test_kv_len_ignored(self):
        wrong = self.merged()
        lens = [("I64", [T], [0 if r == 2 and t == 1 else 4 for t in range(T)]) for r in range(N)]
        self.guessed("kv_len", wrong, files=self.partials(kv_len=lens))

    def test_file_twice_missing_replaced(self):
        self.guessed("counts rank 1", self.merged(counts=[1, 2, 1]))
        self.guessed("without rank 2", self.merged(counts=[1, 1, 0]))
        self.guessed("rank 0's file in the place of rank 2's", self.merged(lse=[self.lse[0], self.lse[1], self.lse[0]], out=[self.out[0], self.out[1], self.out[0]]))

    def test_given_twice_here(self):
        right = self.merged()
        files = self.partials()
        said = self.guessed("same partial", right, files=[files[0], files[1], files[1]])
        self.assertIn("ranks 1 and 2", " ".join(said["guesses"]))

    def test_no_weights(self):
        self.guessed("plain mean", self.merged(weight=1.0 / N))
        self.guessed("plain sum", self.merged(weight=1.0))

    def only(self, words, *args, **more):
        said = self.guessed(words, *args, **more)
        self.assertEqual(len(said["guesses"]), 1, said)

    def test_one_partial(self):
        for r in range(N):
            self.only(f"is rank {r}'s partial", (self.out[r], self.lse[r]))
            self.only(f"is rank {r}'s partial", (self.out[r], self.merged()[1]))
        self.only("is rank 1's partial", (self.out[1], self.lse[1]), files=self.partials()[:2])

    def test_shifted(self):
        merged, lse = self.merged()
        rows = [merged[i * D:(i + 1) * D] for i in range(T * H)]
        zero = [0.0] * D

        def put(heads, tokens, wraps):
            out = []
            for t in range(T):
                for h in range(H):
                    x, y = t - tokens, h - heads
                    is_in = 0 <= x < T and 0 <= y < H
                    out += rows[x % T * H + y % H] if is_in or wraps else zero
            return out, lse

        self.only("heads rotated by 1: the row of head i is at head i+1", put(1, 0, True))
        self.only("heads rotated by 1: the row of head i is at head i-1", put(-1, 0, True))
        self.only("heads shifted by 1: the row of head i is at head i+1", put(1, 0, False))
        self.only("tokens rotated by 2: the row of token i is at token i-2", put(0, -2, True))
        self.only("tokens shifted by 1: the row of token i is at token i+1", put(0, 1, False))

    def test_equal_rows_are_not_shifted(self):
        self.out = [[f32(r + 1.0)] * (T * H * D) for r in range(N)]
        self.lse = [[0.5 * r] * (T * H) for r in range(N)]
        merged, lse = self.merged()
        merged[5] += 1.0
        self.assertEqual(self.compare((merged, lse))["guesses"], [])

    def test_rounding(self):
        merged, lse = self.merged()
        self.guessed("was rounded to bf16", ([bf16(x) for x in merged], lse))
        self.guessed("LSEs to bf16", self.merged(lse=[[bf16(x) for x in r] for r in self.lse]))
        self.guessed("partials to bf16", self.merged(out=[[bf16(x) for x in r] for r in self.out]))

    def test_sink(self):
        path = self.path("sink.safetensors")
        write(path, sink=("F32", [H], self.sink))
        self.assertTrue(self.compare(self.merged(sink=1.0), "--sink", path)["within"])
        self.guessed("without the sink", self.merged(), "--sink", path)
        self.guessed("once per rank", self.merged(sink=float(N)), "--sink", path)
        said = self.guessed("a sink that this run was not given", self.merged(sink=1.0))
        self.assertEqual(len(said["guesses"]), 1, said)
        told = re.search(r"that of head (\d+) is about (\S+)\)", said["guesses"][0])
        self.assertAlmostEqual(float(told[2]), self.sink[int(told[1])], 3)
        merged, lse = self.merged()
        self.assertEqual(self.compare(([0.5 * x for x in merged], lse))["guesses"], [])

    def test_refused(self):
        files = self.partials()
        rc, out, err = run("merge", "--lse-base", "e", "--compare", self.path("none"), *files)
        self.assertEqual((rc, out), (2, ""))
        self.assertTrue(err.startswith("dcp-attn: --compare: cannot open '" + self.path("none")), err)
        write(self.path("small"), out=("F32", [T, H, 1], [0.0] * (T * H)))
        rc, out, err = run("merge", "--lse-base", "e", "--compare", self.path("small"), *files)
        self.assertEqual((rc, out), (2, ""))
        self.assertIn(f"[{T},{H},1]", err)
        self.assertTrue(err.startswith("dcp-attn: --compare: "), err)
        rc, out, err = run("merge", "--lse-base", "e", "-o", self.path("out"), "--sink", self.path("none"), *files)
        self.assertEqual((rc, err[:len("dcp-attn: --sink: ")]), (1, "dcp-attn: --sink: "))
        self.assertEqual(run("merge", "--lse-base", "e", *files)[0], 2)
