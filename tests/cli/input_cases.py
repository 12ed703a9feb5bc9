# SPDX-License-Identifier: Apache-2.0
"""Tests of options that clash; test_cli.py runs them."""
import os, subprocess, unittest

from bench_cases import mpi_runs

EXE = None  # set by test_cli.py
MODEL = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "gguf", "llama-f32.gguf")


def run(*args, env=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
    p = subprocess.run([EXE, *args], capture_output=True, text=True, env={**clean, **(env or {})}, timeout=120)
    return p.returncode, p.stdout, p.stderr


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
