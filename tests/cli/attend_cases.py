# SPDX-License-Identifier: Apache-2.0
"""Tests of `attend --tp`, `attend --project` and `generate --tp`.   attend_cases.py PATH/TO/dcp-attn [-v] [TEST...]"""
import json, math, os, random, re, resource, shutil, subprocess, sys, tempfile, unittest

from tensor_files import read, write

EXE = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 else None


def run(*args, env=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
    p = subprocess.run([EXE, *args], capture_output=True, text=True, env={**clean, **(env or {})}, timeout=120)
    return p.returncode, p.stdout, p.stderr


class Attend(unittest.TestCase):
    T, H, HKV, DK, D, P, L = 5, 8, 4, 12, 10, 3, 41
    LEAST_MEMORY = 64 << 10  # that the option takes

    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)
        r = random.Random(5)
        self.file, self.maps = os.path.join(self.dir, "in.safetensors"), os.path.join(self.dir, "maps.safetensors")
        values = lambda *shape: ("F32", list(shape), [r.uniform(-1, 1) for _ in range(math.prod(shape))])
        write(self.file, q=values(self.T, self.H, self.DK), k=values(self.L, self.HKV, self.DK), v=values(self.L, self.HKV, self.D), sink=values(self.H))
        self.w = values(self.H, self.D, self.P)
        write(self.maps, project=self.w)

    def attend(self, *args):
        out = os.path.join(self.dir, "out.safetensors")
        rc, text, err = run("attend", self.file, "-o", out, "--causal", "--json", *args)
        self.assertEqual(rc, 0, err)
        return read(out), json.loads(text)

    def least_memory(self, *args):
        """What one row takes on this machine: a refused limit names it, of the rank that refused; the ranks' numbers may differ."""
        need = self.LEAST_MEMORY
        for _ in range(8):
            rc, _, err = run("attend", self.file, "-o", os.path.join(self.dir, "x"), "--causal", "--memory", str(need), *args)
            if rc == 0:
                return need
            found = re.search(r"--memory is (\d+), one row of \d+ heads with \d+ threads needs (\d+)", err)
            self.assertIsNotNone(found, err)
            self.assertEqual(int(found[1]), need)
            self.assertGreater(int(found[2]), need)
            need = int(found[2])
        self.fail(f"--memory {need} is refused, too: {err}")

    def test_nonfinite(self):
        """A NaN that rows see, and values whose sum leaves float32: left out and counted, or refused with nothing written."""
        path, out = os.path.join(self.dir, "spoilt"), os.path.join(self.dir, "out")
        for name, change in (("k", lambda x: [math.nan] + x[1:]), ("v", lambda x: [3e38] * len(x))):
            tensors = read(self.file)
            kind, shape, values = tensors[name]
            write(path, **{**tensors, name: (kind, shape, change(list(values)))})
            for ranks in ("1", "3"):
                rc, text, err = run("attend", path, "-o", out, "--causal", "--json", "-n", ranks)
                self.assertEqual(rc, 0, err)
                said = json.loads(text)
                self.assertGreater(said["nonfinite_values"] + said["lse_bad"], 0)
                os.remove(out)
                rc, _, err = run("attend", path, "-o", out, "--causal", "-n", ranks, "--nonfinite", "error")
                self.assertEqual(rc, 1, err)
                self.assertIn(f"{path}: ", err)
                self.assertIn(" of partial results are NaN or infinite; --nonfinite zero leaves them out", err)
                self.assertFalse(os.path.exists(out))
        self.attend("--nonfinite", "error")

    def test_file_that_may_not_grow(self):
        out = os.path.join(self.dir, "out")
        p = subprocess.run([EXE, "attend", self.file, "-o", out, "--causal", "-n", "1"], capture_output=True, text=True, timeout=60,
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
        self.assertEqual((p.returncode, p.stderr), (1, f"dcp-attn: writing {out}: File too large\n"))
        self.assertEqual(set(os.listdir(self.dir)), {os.path.basename(f) for f in (self.file, self.maps)})

    def test_positions_beyond_the_keys(self):
        tensors = read(self.file)
        path = os.path.join(self.dir, "beyond")
        write(path, **tensors, q_pos=("I64", [self.T], [0, -1, self.L - 1, self.L, 2]))
        for ranks in ("1", "2"):
            rc, _, err = run("attend", path, "-o", os.path.join(self.dir, "x"), "--causal", "-n", ranks)
            self.assertEqual(rc, 1, err)
            self.assertIn(f"q_pos[3] is {self.L}; the keys are at 0 to {self.L - 1}", err)

    def close(self, a, b, tol=2e-6):
        self.assertEqual(a[:2], b[:2])
        self.assertLess(max(abs(x - y) for x, y in zip(a[2], b[2])), tol)

    def test_tp(self):
        want, _ = self.attend("-n", "1")
        for n, tp, comm in ((2, 2, "shm"), (6, 2, "shm"), (4, 4, "threads"), (4, 2, "threads")):
            got, said = self.attend("-n", str(n), "--tp", str(tp), "--comm", comm)
            self.close(got["out"], want["out"])
            self.close(got["lse"], want["lse"])
            self.assertEqual(sum(said["rank_keys"]), tp * self.L)

    def test_tp_refused(self):
        """The ranks are known from the command line, the KV heads from the file."""
        for n, tp, code, text in ((3, 2, 2, "ranks, here 3"), (2, 4, 2, "ranks, here 2"), (3, 3, 1, "3 ranks and the 4 KV heads")):
            rc, _, err = run("attend", self.file, "-o", os.path.join(self.dir, "x"), "-n", str(n), "--tp", str(tp))
            self.assertEqual(rc, code)
            self.assertIn(f"--tp {tp} must divide the {text}", err)

    def test_memory(self):
        """The least limit serves, a byte less does not, and the bits are those of any other."""
        for args in (("-n", "1"), ("-n", "2"), ("-n", "3", "--comm", "threads"), ("-n", "3", "--algo", "alltoall")):
            want, said = self.attend(*args)
            least = self.least_memory(*args)
            self.assertLess(least, said["workspace_bytes"])
            got, said = self.attend("--memory", str(least), *args)
            self.assertEqual(got, want)
            self.assertLessEqual(said["workspace_bytes"], least)
            if least == self.LEAST_MEMORY:
                continue
            rc, _, err = run("attend", self.file, "-o", os.path.join(self.dir, "x"), "--memory", str(least - 1), *args)
            self.assertEqual(rc, 1)
            self.assertIn(f"--memory is {least - 1}, ", err)

    def test_project(self):
        little = str(self.least_memory("--project", self.maps, "-n", "2"))
        plain, _ = self.attend("-n", "1")
        want = []
        for t in range(self.T):
            for h in range(self.H):
                row = plain["out"][2][(t * self.H + h) * self.D:][:self.D]
                want += [sum(row[d] * self.w[2][(h * self.D + d) * self.P + p] for d in range(self.D)) for p in range(self.P)]
        for args in (("-n", "1"), ("-n", "3"), ("-n", "4", "--tp", "2"), ("-n", "3", "--algo", "alltoall"), ("-n", "2", "--memory", little)):
            got, _ = self.attend("--project", self.maps, *args)
            self.close(got["out"], ("F32", [self.T, self.H, self.P], want), 1e-5)
            self.close(got["lse"], plain["lse"])

    def test_project_refused(self):
        write(self.maps, project=("F32", [2, 2, 2], [0.0] * 8))
        rc, _, err = run("attend", self.file, "-o", os.path.join(self.dir, "x"), "--project", self.maps)
        self.assertEqual(rc, 1)
        self.assertIn("project is [2,2,2] but heads are [8,10]", err)
        write(self.maps, project=("F32", [self.H, self.D, 0], []))
        rc, _, err = run("attend", self.file, "-o", os.path.join(self.dir, "x"), "--project", self.maps)
        self.assertEqual(rc, 1)
        self.assertIn("project is [8,10,0]", err)
        self.assertIn("P, must be at least 1", err)

    def test_latent_with_values(self):
        """Two sources of values: none is left out silently."""
        rc, _, err = run("attend", self.file, "-o", os.path.join(self.dir, "x"), "--latent", "10")
        self.assertEqual(rc, 1)
        self.assertIn("holds a tensor 'v', but --latent 10", err)
        self.assertEqual(os.listdir(self.dir).count("x"), 0)

    def test_inputs_are_not_replaced(self):
        link = os.path.join(self.dir, "link.safetensors")
        os.link(self.file, link)
        part = os.path.join(self.dir, "part.safetensors")
        write(part, out=("F32", [2, 3, 4], [0.0] * 24), lse=("F32", [2, 3], [0.0] * 6))
        for args, out in ((("attend", self.file, "-o"), self.file), (("attend", self.file, "-o"), link),
                          (("attend", self.file, "--project", self.maps, "-o"), self.maps),
                          (("merge", part, "--lse-base", "e", "-o"), part),
                          (("generate", "-m", self.file, "-p", "x", "--logits"), self.file)):
            with open(out, "rb") as f:
                before = f.read()
            rc, _, err = run(*args, out)
            with open(out, "rb") as f:
                self.assertEqual(f.read(), before)
            self.assertEqual(rc, 2, err)
            self.assertIn("would replace an input", err)

    def test_a_named_model_is_not_replaced(self):
        models = os.path.join(self.dir, "models")
        os.mkdir(models)
        model = os.path.join(models, "small.gguf")
        with open(model, "wb") as f:
            f.write(b"the user's own")
        rc, _, err = run("generate", "-m", "small", "-p", "x", "--logits", model, env={"DCP_ATTN_CACHE": self.dir})
        with open(model, "rb") as f:
            self.assertEqual(f.read(), b"the user's own")
        self.assertEqual(rc, 2, err)
        self.assertIn("would replace an input", err)

    def test_what_is_left_out_is_said(self):
        q, out = ("F32", [1, 1, 2], [1.0, 1.0]), os.path.join(self.dir, "x")
        for k, v, text in ((1.0, 1.0, None), (math.nan, 1.0, "left out: 0 values and 1 LSE of"), (1.0, math.nan, "left out: 1 value and 0 LSEs")):
            write(self.file, q=q, k=("F32", [2, 1, 2], [k, 1.0, 1.0, 1.0]), v=("F32", [2, 1, 2], [v, 1.0, 1.0, 1.0]))
            rc, _, err = run("attend", self.file, "-o", out, "-n", "2", "-t", "1")
            self.assertEqual(rc, 0, err)
            self.assertIn(text or "workspace", err)
            self.assertEqual("left out" in err, text is not None)

    def test_zero_heads_are_named(self):
        write(self.file, q=("F32", [1, 0, 8], []), k=("F32", [4, 2, 8], [0.0] * 64), v=("F32", [4, 2, 8], [0.0] * 64))
        rc, _, err = run("attend", self.file, "-o", os.path.join(self.dir, "x"), "-n", "2")
        self.assertEqual(rc, 1)
        self.assertIn("0 query heads, keys of 8 values and values of 8; none may be 0", err)

    def test_absurd_depth_is_refused(self):
        rc, _, err = run("bench", "generate", "-m", "none", "-d", "1000000000000")
        self.assertEqual(rc, 2, err)
        self.assertIn("numbers from 0 to 16777216", err)


class HeadGroups(unittest.TestCase):
    """generate --tp on real weights: 3 KV heads."""

    def test_same_text(self):
        cache = os.environ.get("DCP_ATTN_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dcp-attn")
        model = os.path.join(cache, "models", "smollm2-135m.gguf")
        if not os.path.exists(model):
            self.skipTest(f"no {model}; scripts/fetch-model.sh smollm2-135m fetches it")
        said = {}
        for name, args in (("one", ("-n", "1")), ("tp", ("-n", "3", "--tp", "3")), ("both", ("-n", "6", "--tp", "3"))):
            rc, out, err = run("generate", "-m", model, "-p", "The history of mathematics begins with counting. Long before", "--raw", "--temp", "0", "--max-tokens", "8", "--json", *args)
            self.assertEqual(rc, 0, err)
            said[name] = json.loads(out)
        n = said["one"]["table"][0]["kv_tokens"]
        one = said["one"]["table"][0]["kv_bytes"]
        for name in ("tp", "both"):
            self.assertEqual(said[name]["ids"], said["one"]["ids"])
            self.assertTrue(all(3 * r["kv_bytes"] == one for r in said[name]["table"]), "a third of the KV heads, in one page each")
        self.assertEqual([r["kv_tokens"] for r in said["tp"]["table"]], [n, n, n])
        self.assertEqual(sum(r["kv_tokens"] for r in said["both"]["table"]), 3 * n)
        rc, _, err = run("generate", "-m", model, "-p", "a", "-n", "4", "--tp", "2", "--max-tokens", "1")
        self.assertEqual(rc, 1)
        self.assertIn("must divide the 4 ranks and the model's 3 KV heads", err)


if __name__ == "__main__":
    unittest.main()
