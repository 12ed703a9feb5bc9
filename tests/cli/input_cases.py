# SPDX-License-Identifier: Apache-2.0
"""Tests of what `merge` and `attend` take from their files, and of options that clash; test_cli.py runs them."""
import os, re, shutil, subprocess, tempfile, unittest

from bench_cases import mpi_runs
from tensor_files import read, write

EXE = None  # set by test_cli.py
MODEL = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "gguf", "llama-f32.gguf")


def run(*args, env=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
    p = subprocess.run([EXE, *args], capture_output=True, text=True, env={**clean, **(env or {})}, timeout=120)
    return p.returncode, p.stdout, p.stderr


class Inputs(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)
        self.a, self.b, self.out = (os.path.join(self.dir, n) for n in ("a", "b", "out"))

    def merge(self, *args, rc=0):
        got, text, err = run("merge", "--lse-base", "e", "-o", self.out, *args)
        self.assertEqual(got, rc, err)
        return read(self.out) if rc == 0 else err

    def attend(self, *args, rc=0):
        got, text, err = run("attend", self.a, "-o", self.out, *args)
        self.assertEqual(got, rc, err)
        return read(self.out) if rc == 0 else err

    def partials(self, **more):
        kept = {"out": ("F32", [1, 1, 2], [1.0, 2.0]), "lse": ("F32", [1, 1], [0.5])}
        for path in (self.a, self.b):
            write(path, **{**kept, **more})

    def test_tensors_that_nobody_asks_for(self):
        more = {"ids": ("U32", [2], [1, 2]), "n": ("U16", [1], [3]), "big": ("U64", [1], [4]), "w": ("F8_E4M3", [3], [1, 2, 3]), "x": ("BF8", [5], [1] * 5)}
        self.partials(**more)
        self.assertEqual(self.merge(self.a, self.b)["out"], ("F32", [1, 1, 2], [1.0, 2.0]))
        f = ("F32", [1, 1, 2], [1.0, 2.0])
        write(self.a, q=f, k=f, v=f, **more)
        self.assertEqual(self.attend()["out"], ("F32", [1, 1, 2], [1.0, 2.0]))

    def test_types_asked_for(self):
        """The types that are named are those that are taken."""
        floats, ints = "F32, F16, BF16 or F64 is needed", "I64 or I32 is needed"
        for name, tensor, want in (("out", ("U32", [1, 1, 2], [1, 2]), floats), ("lse", ("BF8", [1, 1], [1]), floats), ("kv_len", ("U16", [1], [1]), ints),
                                   ("kv_len", ("F64", [1], [1.0]), ints)):
            self.partials(**{name: tensor})
            self.assertIn(f"tensor '{name}' is {tensor[0]}; {want}", self.merge(self.a, self.b, rc=1))
        f = ("F32", [1, 1, 2], [1.0, 2.0])
        for name, tensor, want in (("q", ("I64", [1, 1, 2], [1, 2]), floats), ("v", ("U32", [1, 1, 2], [1, 2]), floats), ("sink", ("I32", [1], [1]), floats),
                                   ("q_pos", ("U32", [1], [0]), ints)):
            write(self.a, **{"q": f, "k": f, "v": f, name: tensor})
            self.assertIn(f"tensor '{name}' is {tensor[0]}; {want}", self.attend(rc=1))
        for kind in ("I64", "I32"):
            self.partials(kv_len=(kind, [1], [1]))
            self.merge(self.a, self.b)

    def test_f64(self):
        """F64 is rounded to F32, as attend does it; what F32 cannot hold is refused, infinities are not."""
        self.partials()
        want = self.merge(self.a, self.b)
        self.partials(out=("F64", [1, 1, 2], [1.0 + 1e-12, 2.0]), lse=("F64", [1, 1], [0.5]))
        self.assertEqual(self.merge(self.a, self.b), want)
        rc, text, err = run("merge", "--lse-base", "e", "--compare", self.out, self.a, self.b)
        self.assertEqual(rc, 0, text + err)
        self.assertEqual(self.merge(self.a, self.b, "--out-dtype", "f16")["out"], ("F16", [1, 1, 2], [1.0, 2.0]))
        self.partials(lse=("F64", [1, 1], [-float("inf")]))
        self.assertEqual(self.merge(self.a, self.b)["out"], ("F32", [1, 1, 2], [0.0, 0.0]))
        self.partials(out=("F64", [1, 1, 2], [1.0, 1e39]))
        self.assertIn("tensor 'out': element 1 is 1e+39, beyond the range of F32", self.merge(self.a, self.b, rc=1))
        f = ("F32", [1, 1, 2], [1.0, 2.0])
        write(self.a, q=f, k=f, v=("F64", [1, 1, 2], [-1e39, 0.0]))
        self.assertIn("tensor 'v': element 0 is -1e+39, beyond the range of F32", self.attend(rc=1))

    def test_type_of_the_cache(self):
        """Values are not cut to the type of the keys, nor keys to that of the values."""
        v = 1.0 + 2.0**-20
        q, half, full = ("F32", [1, 1, 2], [1.0, 2.0]), ("F16", [1, 1, 2], [1.0, 2.0]), ("F32", [1, 1, 2], [v, 2.0])
        write(self.a, q=q, k=half, v=full)
        self.assertEqual(self.attend()["out"], ("F32", [1, 1, 2], [v, 2.0]))
        self.assertEqual(self.attend("--kv-dtype", "f16")["out"], ("F32", [1, 1, 2], [1.0, 2.0]))
        write(self.a, q=q, k=full, v=half)
        self.assertAlmostEqual(self.attend()["lse"][2][0], (v + 4.0) / 2.0**0.5, delta=2e-7)

    def test_one_of_a_kind(self):
        self.partials(lse=("F32", [1, 1], [-float("inf")]))
        write(self.b, out=("F32", [1, 1, 2], [1.0, 2.0]), lse=("F32", [1, 1], [0.5]))
        rc, _, err = run("merge", "--lse-base", "e", "-o", self.out, self.a, self.b)
        self.assertEqual(rc, 0, err)
        self.assertIn("0 bad and 1 empty LSE\n", err)
        write(os.path.join(self.dir, "other"), out=("F32", [1, 1, 2], [1.0 + 2.0**-23, 2.0]), lse=("F32", [1, 1], [0.5]))
        rc, text, err = run("merge", "--lse-base", "e", "--compare", os.path.join(self.dir, "other"), self.a, self.b)
        self.assertEqual(rc, 0, text + err)
        self.assertIn(": 1 ULP of f32", text)

    def test_help_says_types_and_bases(self):
        merge, attend = (re.sub(r"\s+", " ", run(c, "--help")[1]) for c in ("merge", "attend"))
        for text in ("sink [H], in the base of the LSEs; the lse written is without it", "Written as F32, in the same base, without the sink", "kv_len I64 or I32",
                     "direct sends none, halving, hierarchical and allreduce send f32", "F64, which is rounded to F32"):
            self.assertIn(text, merge)
        for text in ("F64, which is rounded to F32", "q_pos I64 or I32", "the last T of the L positions", "a negative one is padding", "natural logarithm of what joins"):
            self.assertIn(text, attend)


class Clashes(unittest.TestCase):
    """What the command line alone shows to be wrong: exit 2, said once, before any rank starts."""

    def refused(self, args, *words, env=None):
        rc, out, err = run(*args, env=env)
        self.assertEqual((rc, out, err.count("\n")), (2, "", 1), err)
        self.assertNotRegex(err, r"rank \d+:")
        for w in words:
            self.assertIn(w, err)

    def test_order_of_an_algorithm(self):
        for algo in ("halving", "hierarchical", "allreduce", "allreduce-temp"):
            self.refused(["merge", "--lse-base", "e", "-o", "x", "--order", "rank", "--algo", algo, "a", "b"], f"--order rank: --algo {algo} ")
        self.refused(["merge", "--lse-base", "e", "-o", "x", "--algo", "halving", *["a"] * 1025], "--algo halving", "1024", "1025")

    def test_head_groups(self):
        self.refused(["attend", "-o", "x", "--tp", "7", "a"], "--tp 7", "ranks, here 1 (-n says how many)")
        self.refused(["attend", "-o", "x", "-n", "3", "--tp", "2", "a"], "--tp 2", "ranks, here 3")
        for command in (["generate", "-p", "x"], ["perplexity", "-p", "x"], ["bench", "generate"]):
            self.refused([*command, "-m", MODEL, "-n", "4", "--tp", "3"], "--tp 3", "ranks, here 4")
        for rc, out, err in mpi_runs("-n", "3", EXE, "attend", "-o", "x", "--tp", "2", "a"):
            self.assertNotEqual(rc, 0)
            self.assertEqual(err.count("--tp 2 must divide the ranks, here 3"), 1, err)

    def test_memory_limit(self):
        for limit in ("20X", "8 apples", "-1", "1KK"):
            for args in (["info"], ["merge", "--lse-base", "e", "-o", "x", "a", "b"], ["generate", "-m", MODEL, "-p", "x"], ["bench", "product"]):
                self.refused(args, "DCP_ATTN_MEMORY_LIMIT", f'"{limit}"', "bytes, with K, M or G", env={"DCP_ATTN_MEMORY_LIMIT": limit})
        self.assertEqual(run("merge", "--help", env={"DCP_ATTN_MEMORY_LIMIT": "20X"})[0], 0)

    def test_latent_attention(self):
        """A form of a cache that the model does not have is refused, not ignored."""
        for command in (["generate", "--raw", "-p", "a", "--max-tokens", "1"], ["perplexity", "-p", "a text"], ["bench", "generate", "-p", "1", "-g", "1", "-r", "1"]):
            for form in ("absorbed", "projected", "expanded"):
                rc, out, err = run(*command, "-m", MODEL, "--mla", form)
                self.assertEqual((rc, out), (1, ""), err)
                self.assertIn(f"--mla {form}: {MODEL} has no latent attention", err)
