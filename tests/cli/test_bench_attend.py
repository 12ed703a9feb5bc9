# SPDX-License-Identifier: Apache-2.0
"""Tests of `bench attend | extend | product | oom` and of `bench generate`'s report. Usage: test_bench_attend.py DCP_ATTN [unittest options]"""
import json, os, re, shutil, subprocess, sys, unittest

import bench_cases
from bench_cases import mpi_runs, run

ROW = {"case", "keys", "tokens", "ranks", "threads", "dtype", "isa", "time_us", "read_fraction", "matrix_fraction", "workspace_bytes", "peak_extra_bytes"}
SMALL_ATTENTION, SMALL_PRODUCT = ("--iters", "3", "--cold", "0"), ("--iters", "3", "--product-bytes", "200K")
SMALL = (*SMALL_ATTENTION, *SMALL_PRODUCT[2:])
SMALL_OOM = ("bench", "oom", "--json", "--tokens", "512", "--heads", "24", "--prefix", "100", "--window", "48", "--memory", "3M")
MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "gguf", "llama-f32.gguf")


class BenchAttend(unittest.TestCase):
    def bench(self, what, *args, ran=True):
        rc, out, err = run("bench", what, "--json", *{"attend": SMALL, "extend": SMALL_ATTENTION, "product": SMALL_PRODUCT}[what], *args)
        self.assertEqual(rc, 0, err)
        said = json.loads(out)
        machine = said["machine"]
        self.assertGreater(machine["matrix_GFLOPs"], 0)
        self.assertIn(machine["matrix_isa"], machine["peaks_GFLOPs"])
        if ran:
            self.assertGreater(machine["read_GBps"], 0)
        for row in said["rows"]:
            self.assertLessEqual(ROW, set(row))
            self.assertEqual(row["wrong"], 0 if ran or row["case"] == "product" else None, row)
            self.assertEqual(row["disturbed"], ran and (row["matrix_GFLOPs"] < max(0.85 * row["best_GFLOPs"], 0.7 * row["peak_GFLOPs"]) or
                                                        any(row[k]["median"] > 2 * row[k]["min"] for k in ("time_us", "read_us"))), row)
            if ran:
                self.assertGreaterEqual(row["best_GFLOPs"], row["matrix_GFLOPs"])
                self.assertGreaterEqual(row["peak_GFLOPs"], row["best_GFLOPs"])
                self.assertGreaterEqual(machine["matrix_GFLOPs"], row["peak_GFLOPs"])
                self.assertLessEqual(row["time_us"]["min"], row["time_us"]["median"])
                self.assertGreater(row["read_fraction"], 0)
                self.assertGreater(row["matrix_fraction"], 0)
            if row["case"] != "product":
                self.assertLessEqual(row["workspace_bytes"], 64 << 20)
                self.assertLessEqual(row["peak_extra_bytes"], row["workspace_bytes"] + (1 << 20))
        return said["rows"]

    def test_defaults(self):
        rows = self.bench("attend", "--keys", "700")
        self.assertEqual([(r["case"], r["tokens"], r["dtype"]) for r in rows],
                         [("gqa-decode", 1, "bf16"), ("mla-decode", 1, "bf16"), ("mla-decode", 2, "bf16"), ("product", 1, "Q8_0"),
                          ("product", 1, "Q4_1")])
        rows = self.bench("extend", "--keys", "100", "--tokens", "20")
        self.assertEqual([(r["case"], r["keys"], r["tokens"]) for r in rows], [("gqa-extend", 100, 20), ("mla-extend", 100, 20)])

    def test_few_keys(self):
        """What bf16 weights may cost is most where a row sees few keys, and little where it sees many."""
        rows = [row for n in ("12", "13") for row in self.bench("extend", "--keys", n, "--tokens", n, "-n", "1,2", "-t", "1")]
        rows += self.bench("extend", "--keys", "3000", "--tokens", "40")
        for row in rows:
            self.assertLess(row["worst_error"], 2.0 / 256 if row["keys"] < 100 else 1e-3, row)

    def test_reads_of_more_ranks_than_cpus(self):
        """A rank that waits for a CPU is no faster reader: see bench_cases.py."""
        cpus = sorted(os.sched_getaffinity(0))[:2]
        best = {len(cpus): 0, 8: 0}
        for n in [*best] * 2:
            p = subprocess.run([bench_cases.EXE, "bench", "attend", "--json", "--case", "gqa-decode", "--keys", "32K", "--iters", "6", "-n", str(n), "-t", "1"],
                               capture_output=True, text=True, timeout=120, preexec_fn=lambda: os.sched_setaffinity(0, cpus))
            self.assertEqual(p.returncode, 0, p.stderr)
            machine = json.loads(p.stdout)["machine"]
            best[n] = max(best[n], machine["read_GBps"])
        self.assertLess(best[8], 1.5 * best[len(cpus)])

    def test_stray_separators(self):
        for option, text in (("--case", "gqa-decode,"), ("--isa", "avx2,"), ("--keys", "1K,"), ("--keys", ",1K"), ("--dtype", "bf16,,f16"), ("--types", "Q8_0,")):
            rc, out, err = run("bench", "attend", option, text)
            self.assertEqual((rc, out), (2, ""), err)
            self.assertIn(f"{option}: '{text}' is not right", err)

    def test_sweeps(self):
        rows = self.bench("attend", "--case", "gqa-decode", "--keys", "64..1K", "--factor", "4", "--ranks", "1,2,3", "--threads", "1,2", "--heads", "6",
                          "--kv-heads", "2", "--head-dim", "32", "--dtype", "f32,f16,bf16,int8,fp8")
        self.assertEqual({(r["keys"], r["ranks"], r["threads"], r["dtype"]) for r in rows},
                         {(k, n, t, d) for k in (64, 256, 1024) for n in (1, 2, 3) for t in (1, 2) for d in ("f32", "f16", "bf16", "int8", "fp8")})

    def test_threads_and_shapes(self):
        for comm in ("threads", "shm"):
            for args in (("--case", "mla-extend", "--heads", "5", "--latent", "24", "--rope", "8", "--tokens", "3,9", "--interleave", "16"),
                         ("--case", "gqa-extend", "--window", "40", "--tokens", "30", "--heads", "8", "--memory", "2M")):
                rows = self.bench("extend", "--comm", comm, "-n", "2", "-t", "1", "--keys", "150", *args)
                self.assertEqual({r["comm"] for r in rows}, {comm})
                for r in rows:
                    split = r["split_us"]
                    self.assertGreater(split["partial"], 0)
                    self.assertGreater(split["merge"], 0)

    def test_isa(self):
        rows = self.bench("attend", "--case", "gqa-decode,product", "--keys", "100", "--isa", "scalar,auto", "--heads", "2", "--kv-heads", "1")
        self.assertEqual(rows[0]["isa"], "scalar")
        self.assertEqual({r["isa"] for r in rows[:3]}, {"scalar"})

    def test_products(self):
        types = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
        for exact in ((), ("--exact",)):
            rows = self.bench("product", "--types", ",".join(types), "--product-k", "512", "-n", "2", "-t", "1", *exact)
            self.assertEqual([r["dtype"] for r in rows], list(types))
            self.assertEqual({(r["case"], r["keys"], r["exact"]) for r in rows}, {("product", None, bool(exact))})

    def test_product_of_a_row(self):
        """The results of one row or a few may all be near 0: errors are shares of what they could be."""
        for options in (("Q4_K,Q5_K", "2304", "1K", "-n", "1"), ("Q4_0", "1280", "1K", "-n", "3")):
            rc, out, err = run("bench", "product", "--types", options[0], "--product-k", options[1], "--product-bytes", options[2], *options[3:], "-t", "1", "--iters", "0", "--json")
            self.assertEqual(rc, 0, err)
            self.assertEqual({r["wrong"] for r in json.loads(out)["rows"]}, {0})

    def test_window(self):
        """What no row sees is not read: not by attention and not by what it is compared with."""
        for window, tokens, case in ((512, 1, "gqa-decode"), (700, 1, "mla-decode"), (256, 20, "gqa-extend"), (1, 1, "gqa-decode")):
            for ranks in ("1", "2"):
                what = "extend" if case.endswith("extend") else "attend"
                row, = self.bench(what, "--case", case, "--keys", "5000", "--tokens", str(tokens), "--window", str(window), "-n", ranks, "-t", "1")
                key = 8 * 2 * 128 * 2 if case.startswith("gqa") else 576 * 2
                self.assertGreaterEqual(row["read_bytes"], (window + tokens - 1) * key)
                self.assertLessEqual(row["read_bytes"], (window + tokens + 2 * row["page_tokens"]) * key * 1.01)

    def test_memory_only(self):
        rows = self.bench("attend", "--case", "gqa-decode", "--keys", "64..300", "--iters", "0", "-n", "1", "-t", "1", ran=False)
        self.assertEqual([r["keys"] for r in rows], [64, 256, 300])
        rows = self.bench("extend", "--case", "mla-extend", "--keys", "300", "--tokens", "64", "--iters", "0", ran=False)
        self.assertIsNone(rows[0]["time_us"]["min"])
        self.assertGreater(rows[0]["workspace_bytes"], 0)

    def test_page(self):
        for args, page in (((), 128), (("--page", "96"), 96)):
            rows = self.bench("attend", "--case", "gqa-decode", "--keys", "4096", "--cold", "0", "--iters", "0", "-n", "1", *args, ran=False)
            self.assertEqual({r["page_tokens"] for r in rows}, {page})

    def test_table(self):
        rc, out, err = run("bench", "attend", *SMALL, "--keys", "100", "-n", "1,2", "-t", "1")
        self.assertEqual(rc, 0, err)
        for word in ("% peak", "g/p/m", "workspace", "mla-decode", "Q8_0", "wrong", "% read: median time of a plain read over median time"):
            self.assertIn(word, out)
        for what in ("attend", "extend", "product"):
            self.assertRegex(run("bench", what, "--help")[1], r"% read +median time of a plain read(.|\n)*over the median\s+time")
        self.assertLessEqual(max(map(len, out.splitlines())), 100)

    def test_options_of_each(self):
        """A command shows and takes its own options, and says the default of --case."""
        of_attention, of_products = {"--case", "--keys", "--tokens", "--dtype", "--heads", "--page", "--cold"}, {"--types", "--product-k", "--product-bytes", "--exact"}
        for what, has, lacks in (("attend", of_attention | of_products, set()), ("extend", of_attention, of_products), ("product", of_products, of_attention)):
            text = run("bench", what, "--help")[1]
            shown = set(re.findall(r"^  (?:-\w, |    )(--[a-z-]+)", text, re.M))
            self.assertLessEqual(has | {"--factor", "--ranks", "--isa", "--json"}, shown)
            self.assertEqual(shown & lacks, set())
            for option in lacks:
                rc, out, err = run("bench", what, option, "1")
                self.assertEqual((rc, out), (2, ""), err)
        self.assertRegex(run("bench", "attend", "--help")[1], r"\(default\s+gqa-decode,mla-decode,product\)")
        self.assertRegex(run("bench", "extend", "--help")[1], r"\(default\s+gqa-extend,mla-extend\)")
        rc, out, err = run("bench", "extend", "--case", "product")
        self.assertEqual((rc, out), (2, ""))
        self.assertIn("some of gqa-extend,mla-extend", err)

    def test_page_in_the_table(self):
        rc, out, err = run("bench", "attend", *SMALL, "--iters", "0", "--keys", "100", "--page", "512")
        self.assertEqual(rc, 0, err)
        lines = out.splitlines()
        at = next(i for i, line in enumerate(lines) if " page " in line and "workspace" in line)
        rows = [line.split() for line in lines[at:]]
        page = rows[0].index("page")
        self.assertEqual({(r[0], r[page]) for r in rows[1:3]}, {("gqa-decode", "512"), ("mla-decode", "512")})

    def test_level_of_attention_kernels(self):
        """int8 has no kernel for tiles, wherever the CPU has them."""
        for row in self.bench("attend", "--case", "gqa-decode", "--keys", "100", "--dtype", "bf16,int8", "--heads", "2", "--kv-heads", "1"):
            self.assertTrue(row["kernel"].endswith("__" + row["isa"]), row)

    def test_level_of_product_kernels(self):
        """The level is the kernel's own, which --isa only bounds."""
        known = {k["name"] for k in json.loads(run("info", "--json")[1])["kernels"]}
        for row in self.bench("product", "--types", "Q8_0,F32"):
            self.assertIn(row["kernel"], known)
            self.assertTrue(row["kernel"].endswith("__" + row["isa"]), row)

    def test_mpi(self):
        if shutil.which("mpirun.openmpi") is None:
            self.skipTest("no Open MPI")
        env = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_")}
        # Under the sanitizer: what MPI itself never frees is no fault of ours.
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", ASAN_OPTIONS="detect_leaks=0")
        p = subprocess.run(["mpirun.openmpi", "--oversubscribe", "-n", "2", bench_cases.EXE, "bench", "attend", "--json", *SMALL, "--keys", "100", "-t", "1"],
                           capture_output=True, text=True, env=env, timeout=120)
        self.assertEqual(p.returncode, 0, p.stderr)
        rows = json.loads(p.stdout)["rows"]
        self.assertEqual({(r["ranks"], r["comm"], r["wrong"]) for r in rows}, {(2, "mpi", 0)})

    def test_usage(self):
        for what, args, word in (("attend", ["--case", "gpt"], "--case"), ("attend", ["--keys", "4..2"], "--keys"), ("extend", ["--tokens", "0"], "--tokens"),
                                 ("attend", ["--dtype", "f64"], "--dtype"), ("product", ["--types", "Q9_0"], "--types"),
                                 ("product", ["--product-k", "300"], "--product-k"), ("attend", ["--isa", "mmx"], "--isa"),
                                 ("attend", ["--ranks", "x"], "--ranks"), ("attend", ["--threads", "99999"], "--threads"),
                                 ("attend", ["--heads", "9", "--kv-heads", "2"], "--heads"), ("oom", ["--window", "3"], "--window"),
                                 ("attend", ["--page", "48"], "--page 48"), ("extend", ["--page", "16"], "--page"),
                                 ("oom", ["--comm", "threads"], "--comm"), ("oom", ["--cap", "1G", "--no-cap"], "--no-cap")):
            rc, out, err = run("bench", what, *args)
            self.assertEqual((rc, out), (2, ""), err)
            self.assertIn(word, err)

    def test_memory_limit(self):
        rc, out, err = run("bench", "attend", *SMALL, "--keys", "8K", env={"DCP_ATTN_MEMORY_LIMIT": "8M"})
        self.assertEqual((rc, out), (1, ""))
        self.assertIn("bytes wanted", err)
        self.assertIn("limit of 8388608", err)
        rc, out, err = run("bench", "attend", *SMALL, "--keys", "64", env={"DCP_ATTN_MEMORY_LIMIT": "8 apples"})
        self.assertEqual((rc, out), (2, ""))
        self.assertIn("DCP_ATTN_MEMORY_LIMIT", err)


class BenchOom(unittest.TestCase):
    """The out-of-memory demonstration with a small shape."""

    def oom(self, *args):
        rc, out, err = run(*SMALL_OOM, *args)
        self.assertEqual(rc, 0, err)
        return json.loads(out)

    def test_under_a_cap(self):
        for n in (2, 3):
            said = self.oom("-n", str(n), "--formula-ranks", "8")
            rows = {r["form"]: r for r in said["rows"]}
            for form in ("temporaries", "in-place"):
                self.assertFalse(rows[form]["finished"])
                self.assertIn("bytes wanted", rows[form]["error"])
                self.assertIn(f"limit of {said['cap_bytes']}", rows[form]["error"])
                self.assertGreater(rows[form]["predicted_bytes"], said["cap_bytes"])
            row = rows["streaming"]
            self.assertTrue(row["finished"])
            self.assertEqual(row["wrong"], 0)
            self.assertLessEqual(row["workspace_bytes"], 3 << 20)
            self.assertLessEqual(row["peak_bytes"], said["cap_bytes"])
            self.assertLess(abs(row["peak_bytes"] - row["predicted_bytes"]), 1 << 20)
            self.assertGreater(rows["temporaries"]["formula_bytes"], rows["in-place"]["formula_bytes"])

    def test_without(self):
        said = self.oom("-n", "2", "--no-cap")
        for row in said["rows"]:
            self.assertTrue(row["finished"])
            self.assertEqual(row["wrong"], 0, row)
            self.assertLess(abs(row["peak_bytes"] - row["predicted_bytes"]), 1 << 20, row)

    def test_one_byte_short(self):
        """The operator lacks one byte, on all ranks or on the last: a result like any other. A rank says so though no byte is left to it."""
        def streaming(out):
            return next(r for r in json.loads(out)["rows"] if r["form"] == "streaming")

        rc, out, err = run(*SMALL_OOM, "--no-cap")
        peak = streaming(out)["peak_bytes"]
        rc, out, err = run(*SMALL_OOM, "--cap", str(peak))
        self.assertEqual((rc, err, streaming(out)["finished"]), (0, "", True))
        rc, out, err = run(*SMALL_OOM, "--cap", str(peak - 1))
        self.assertEqual((rc, err, streaming(out)["finished"]), (1, "", False))
        self.assertIn("bytes wanted", streaming(out)["error"])
        exe = bench_cases.EXE
        peaks = [streaming(out)["peak_bytes"] for _, out, _ in mpi_runs("-n", "2", exe, *SMALL_OOM, "--no-cap")]
        short = str(min(peaks, default=1) - 1)
        for rc, out, err in mpi_runs("-n", "1", exe, *SMALL_OOM, "--no-cap", ":", "-n", "1", exe, *SMALL_OOM, "--cap", short):
            self.assertNotEqual(rc, 0)
            self.assertNotIn("dcp-attn: ", err)
            self.assertFalse(streaming(out)["finished"], out)
            self.assertIn("workspace of the operator", streaming(out)["error"])

    def test_cannot_begin(self):
        """One rank has no room for q, result and keys: one line, of that rank, and nobody is torn away."""
        exe = bench_cases.EXE
        for rc, out, err in mpi_runs("-n", "1", exe, *SMALL_OOM, "--no-cap", ":", "-n", "1", exe, *SMALL_OOM, "--cap", "1M"):
            self.assertNotEqual(rc, 0)
            self.assertEqual((out, err.count("dcp-attn: ")), ("", 1), err)
            self.assertIn("dcp-attn: rank 1: q, result and keys of a rank: ", err)
            self.assertNotIn("abort(", err.lower())

    def test_limit_from_outside(self):
        """DCP_ATTN_MEMORY_LIMIT stands, whatever the cap."""
        for cap in ("--no-cap", "--cap=1G"):
            rc, out, err = run(*SMALL_OOM, cap, env={"DCP_ATTN_MEMORY_LIMIT": "20K"})
            self.assertEqual((rc, out), (1, ""))
            self.assertIn("of the limit of 20480", err)

    def test_world(self):
        """The launcher says how many ranks there are."""
        for rc, out, err in mpi_runs("-n", "3", bench_cases.EXE, *SMALL_OOM):
            self.assertEqual(rc, 0, err)
            self.assertEqual(json.loads(out)["ranks"], 3)

    def test_text(self):
        rc, out, err = run("bench", "oom", "--tokens", "256", "--heads", "24", "--prefix", "10", "--window", "48", "--memory", "3M", "--formula-ranks", "8")
        self.assertEqual(rc, 0, err)
        for word in ("out of memory", "cap of each rank", "bytes wanted", "by formula", "streaming operator"):
            self.assertIn(word, out)


class BenchGenerate(unittest.TestCase):
    def test_json(self):
        rc, out, err = run("bench", "generate", "-m", MODEL, "-n", "2", "-t", "1", "-p", "6", "-g", "3", "-d", "0,4..16", "-r", "2", "--json")
        self.assertEqual(rc, 0, err)
        said = json.loads(out)
        self.assertEqual([r["test"] for r in said["rows"]], ["pp6", "tg3", "pp6 @ d4", "tg3 @ d4", "pp6 @ d16", "tg3 @ d16"])
        for row in said["rows"]:
            self.assertEqual((row["case"], row["ranks"], row["keys"]), ("generate", 2, row["depth"]))
            self.assertGreater(row["tokens_per_s_median"], 0)
            self.assertGreater(row["peak_bytes"], row["workspace_bytes"])
            self.assertLessEqual(row["time_us"]["min"], row["time_us"]["median"])
        self.assertIn("cpu", said["machine"])
        self.assertEqual(said["fill"], "prompt")

    def test_fill(self):
        args = ("bench", "generate", "-m", MODEL, "-n", "2", "-t", "1", "-p", "0", "-g", "2", "-d", "3,40", "-r", "1", "--fill")
        rc, out, err = run(*args, "random")
        self.assertEqual(rc, 0, err)
        for word in ("random keys and values", "tg2 @ d3", "tg2 @ d40"):
            self.assertIn(word, out)
        rc, out, err = run(*args, "zeros")
        self.assertEqual((rc, out), (2, ""), err)
        self.assertIn("--fill", err)


if __name__ == "__main__":
    bench_cases.EXE = os.path.abspath(sys.argv.pop(1))
    unittest.main()
