#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command as a user meets it: exit codes, messages, help, environment. Usage: test_cli.py PATH/TO/dcp-attn [unittest options]"""
import json, os, re, shutil, stat, subprocess, sys, tempfile, time, unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
GOLDEN = os.path.join(ROOT, "tests", "golden")
EXE = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 else os.path.join(ROOT, "build", "dcp-attn")
TWO = os.path.join(GOLDEN, "merge", "two-ranks")
TWO_FILES = [os.path.join(TWO, f"rank{r}.safetensors") for r in range(2)]

import bench_cases
bench_cases.EXE = EXE
from bench_cases import Bench, Compare, mpi_runs  # noqa: run here too
import input_cases
input_cases.EXE = EXE
from input_cases import Clashes, Inputs  # noqa: run here too
import output_cases
output_cases.EXE = EXE
from output_cases import COMMANDS, Install, ModelOutput, Output  # noqa: run here too
import readme_cases
readme_cases.EXE = EXE
from readme_cases import Readme  # noqa: run here too
from tensor_files import write


def run(*args, env=None, timeout=60):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
    clean.update(env or {})
    p = subprocess.run([EXE, *args], capture_output=True, text=True, env=clean, timeout=timeout)
    return p.returncode, p.stdout, p.stderr


class Usage(unittest.TestCase):
    def refused(self, args, *words, env=None):
        rc, out, err = run(*args, env=env)
        self.assertEqual(rc, 2, err)
        self.assertEqual(out, "")
        self.assertEqual(err.count("\n"), 1, err)
        for w in words:
            self.assertIn(w, err)

    def test_no_command(self):
        rc, out, err = run()
        self.assertEqual((rc, out), (2, ""))
        self.assertIn("Usage:", err)

    def test_unknown_command(self):
        self.refused(["frobnicate"], "'frobnicate'", "--help")

    def test_files_of_readme(self):
        """What README starts `merge` and `attend` with is there, and the commands do what it says."""
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
            lines = re.findall(r"^    (build/dcp-attn (?:merge|attend) .*)$", f.read(), re.M)
        self.assertGreaterEqual(len(lines), 3)
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        for line in lines:
            line = line.replace("build/dcp-attn", '"$EXE"').replace("-o ", f"-o {folder}/")
            p = subprocess.run(["sh", "-c", "in=tests/golden; " + line], cwd=ROOT, env={**os.environ, "EXE": EXE}, capture_output=True, text=True)
            self.assertEqual(p.returncode, 0, line + p.stderr)

    def test_version(self):
        rc, out, _ = run("--version")
        self.assertEqual(rc, 0)
        self.assertRegex(out, r"^dcp-attn \d+\.\d+\.\d+\n$")

    def test_unknown_options(self):
        for c in COMMANDS:
            self.refused([*c.split(), "--frob"], c, "--frob", "no such option")
            self.refused([*c.split(), "-Z"], c, "-Z")

    def test_extra_arguments(self):
        for c in ("generate", "perplexity", "tokenize", "info"):
            self.refused([c, "stray"], "'stray'")
        self.refused(["attend", "a", "b", "-o", "x"], "'b'")

    def test_missing(self):
        self.refused(["merge", "--lse-base", "e", "-o", "x"], "FILE")
        self.refused(["merge", "--lse-base", "e", *TWO_FILES], "-o", "--compare")
        self.refused(["merge", "--lse-base", "e", "-o", "x", "--rtol", "1", *TWO_FILES], "--rtol", "--compare")
        self.refused(["merge", "--lse-base", "e", "-o", "x", "--atol", "0", *TWO_FILES], "--atol", "--compare")
        self.refused(["merge", "-o", "x", *TWO_FILES], "--lse-base")
        self.refused(["attend", "-o", "x"], "FILE")
        self.refused(["generate", "-p", "x"], "-m")
        self.refused(["generate", "-m", "x"], "-p", "-f")
        self.refused(["tokenize", "-m", "x", "-p", "a", "-f", "b"], "one of them")
        self.refused(["merge", "--cut"], "--cut", "value")

    def test_values(self):
        self.refused(["attend", "-n", "0", "-o", "x", "f"], "-n", "'0'", "from 1 to")
        self.refused(["attend", "-n", "two", "-o", "x", "f"], "'two'", "integer")
        self.refused(["attend", "-n", "3x", "-o", "x", "f"], "'3x'")
        self.refused(["attend", "-n", "", "-o", "x", "f"], "-n")
        self.refused(["attend", "--memory", "12Q", "-o", "x", "f"], "--memory", "'12Q'", "K, M or G")
        self.refused(["attend", "--scale", "nan", "-o", "x", "f"], "--scale", "'nan'")
        self.refused(["merge", "--lse-base", "10", "-o", "x", "f"], "--lse-base", "'10'", "e|2")
        self.refused(["merge", "--algo=fast", "-o", "x", "f"], "'fast'", "direct|alltoall")
        self.refused(["merge", "--order", "fast", "-o", "x", "f"], "--order", "'fast'", "auto|rank|any")
        self.refused(["merge", "--json=1", "-o", "x", "f"], "--json", "no value")
        self.refused(["generate", "--top-p", "0", "-m", "x", "-p", "y"], "--top-p", "'0'")
        self.refused(["generate", "--temp", "-1", "-m", "x", "-p", "y"], "--temp", "'-1'")

    def test_environment(self):
        self.refused(["attend", "-o", "x", "f"], "DCP_ATTN_RANKS", "'many'", env={"DCP_ATTN_RANKS": "many"})
        self.refused(["info"], "DCP_ATTN_JSON", "0 or 1", env={"DCP_ATTN_JSON": "yes"})

    def test_raw_and_system(self):
        self.refused(["generate", "-m", "x", "-p", "y", "--raw", "--system", "z"], "--system", "--raw")


class Surroundings(unittest.TestCase):
    """What the command was started with: streams, signals, and files that are no files."""

    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)
        self.out = os.path.join(self.dir, "out")

    def merge(self, out, *more, **how):
        return subprocess.run([EXE, "merge", "--lse-base", "e", "-o", out, *more, *TWO_FILES], capture_output=True, text=True, timeout=60, **how)

    def shell(self, script, *args):
        p = subprocess.run(["sh", "-c", script, "sh", EXE, *args], capture_output=True, text=True, timeout=60)
        return p.returncode, p.stdout, p.stderr

    def test_closed_streams(self):
        args = ["merge", "--lse-base", "e", "-o", self.out, "--json", *TWO_FILES]
        for closed in ("<&-", "2>&-", "<&- 2>&-"):
            rc, out, _ = self.shell(f'"$@" {closed}', *args)
            self.assertEqual(rc, 0, closed)
            self.assertEqual(json.loads(out)["ranks"], 2)
        for closed in (">&-", "<&- >&-"):
            rc, _, err = self.shell(f'"$@" {closed}', *args)
            self.assertEqual(rc, 1, closed)
            self.assertIn("standard output", err)
        self.assertEqual(self.shell('"$@" <&- >&- 2>&-', *args)[0], 1)

    def test_ignored_children(self):
        rc, _, err = self.shell("trap '' CHLD; exec \"$@\"", "merge", "--lse-base", "e", "-o", self.out, *TWO_FILES)
        self.assertEqual(rc, 0, err)

    def test_output_is_a_fifo(self):
        os.mkfifo(self.out)
        reader = os.open(self.out, os.O_RDONLY | os.O_NONBLOCK)
        p = self.merge(self.out)
        got = os.read(reader, 1 << 20)
        os.close(reader)
        self.assertEqual(p.returncode, 0, p.stderr)
        self.assertTrue(stat.S_ISFIFO(os.lstat(self.out).st_mode))
        self.assertEqual(got[8:9], b"{")

    def test_output_is_a_device(self):
        try:
            os.mknod(self.out, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # a null device of the test's own
            os.close(os.open(self.out, os.O_WRONLY))
        except PermissionError:
            self.skipTest("no device can be made and opened here")
        p = self.merge(self.out)
        self.assertEqual(p.returncode, 0, p.stderr)
        self.assertTrue(stat.S_ISCHR(os.lstat(self.out).st_mode))
        os.unlink(self.out)
        os.mknod(self.out, stat.S_IFCHR | 0o600, os.makedev(1, 7))  # always full
        p = self.merge(self.out)
        self.assertEqual(p.returncode, 1)
        self.assertIn("No space left", p.stderr)
        self.assertTrue(stat.S_ISCHR(os.lstat(self.out).st_mode))

    def test_output_is_a_link_or_folder(self):
        os.symlink("real", self.out)
        self.assertEqual(self.merge(self.out).returncode, 0)
        self.assertTrue(os.path.islink(self.out))
        self.assertEqual(sorted(os.listdir(self.dir)), ["out", "real"])
        p = self.merge(self.dir)
        self.assertEqual(p.returncode, 1)
        self.assertIn("a directory", p.stderr)

    def test_input_is_a_fifo(self):
        fifo = os.path.join(self.dir, "fifo")
        os.mkfifo(fifo)
        for args in (["merge", "--lse-base", "e", "-o", self.out, TWO_FILES[0], fifo], ["attend", "-o", self.out, fifo],
                     ["tokenize", "-m", fifo, "-p", "x"]):
            rc, _, err = run(*args, timeout=20)
            self.assertEqual(rc, 1, err)
            self.assertIn("not a regular file", err)
        self.assertFalse(os.path.exists(self.out))

    def test_names(self):
        for args in (["merge", "--lse-base", "e", "-o", self.out, "", ""], ["attend", "-o", self.out, ""]):
            self.assertIn("cannot open ''", run(*args)[2])

    def test_types(self):
        path = os.path.join(self.dir, "in")
        write(path, out=("F32", [1, 2, 4], [0.0] * 8), lse=("F32", [1, 2], [0.0] * 2), kv_len=("F32", [1], [0.0]), sink=("I64", [2], [0, 0]))
        rc, _, err = run("merge", "--lse-base", "e", "-o", self.out, path)
        self.assertEqual(rc, 1)
        self.assertIn(path, err)
        self.assertIn("kv_len", err)

    def test_common_cause(self):
        """What every rank of an MPI world finds is said once."""
        missing = os.path.join(self.dir, "missing")
        for rc, _, err in mpi_runs("-n", "3", EXE, "merge", "--lse-base", "e", "-o", self.out, *[missing] * 3):
            self.assertNotEqual(rc, 0)
            self.assertEqual(err.count("cannot open"), 1, err)

    def test_files_and_ranks_match(self):
        for rc, out, err in mpi_runs("-n", "3", EXE, "merge", "--lse-base", "e", "-o", self.out, "a", "b"):
            self.assertEqual(out, "")
            self.assertNotEqual(rc, 0)
            self.assertEqual(err.count("2 files for 3 ranks of mpirun: there must be one file per rank"), 1, err)
            self.assertNotIn("-n out", err)

    def test_binding_of_one(self):
        """Threads that only one rank cannot have: all leave together, and it is that rank that says so."""
        model = os.path.join(ROOT, "tests", "data", "gguf", "llama-f32.gguf")
        for command in (["perplexity", "-m", model, "-p", "a text"], ["generate", "--raw", "-m", model, "-p", "a"], ["bench", "generate", "-m", model]):
            for rc, _, err in mpi_runs("-n", "1", EXE, *command, "-t", "1", "--bind", "none", ":", "-n", "1", EXE, *command, "-t", "4096", "--bind", "cores"):
                self.assertNotEqual(rc, 0)
                self.assertEqual(err.count("dcp-attn: "), 1, err)
                self.assertIn("dcp-attn: rank 1: --bind cores: ", err)
                self.assertNotIn("abort(", err.lower())

    def test_ranks_of_other_options(self):
        """The option that differs, and its values as the command line has them."""
        model = os.path.join(ROOT, "tests", "data", "gguf", "llama-f32.gguf")
        command = [EXE, "generate", "--raw", "-m", model, "-p", "a", "--max-tokens", "2", "-t", "1"]
        for one, two, said in ((["--kv-dtype", "f32"], ["--kv-dtype", "int8"], "--kv-dtype: f32 and int8"), ([], ["--compute", "f32"], "--compute: auto and f32"),
                               ([], ["--chunk", "3"], "--chunk: default and 3")):
            for rc, _, err in mpi_runs("-n", "1", *command, *one, ":", "-n", "1", *command, *two):
                self.assertNotEqual(rc, 0)
                self.assertIn(f"ranks 0 and 1 run with different options: {said}\n", err)

    def test_fails_before_the_ranks_meet(self):
        """A rank that gives up before MPI starts: the others, who would wait for it, hear of it, and its cause is said with its number."""
        model = os.path.join(ROOT, "tests", "data", "gguf", "llama-f32.gguf")
        good = [EXE, "generate", "--raw", "-m", model, "-p", "a", "--max-tokens", "2", "-t", "1"]
        perplexity = [EXE, "perplexity", "-m", model, "-p", "a text", "-t", "1"]
        for command, bad, said in ((good, ["env", "DCP_ATTN_MEMORY_LIMIT=30K", *good], "rank 1: model file header: "),
                                   (perplexity, ["env", "DCP_ATTN_MEMORY_LIMIT=30K", *perplexity], "rank 1: model file header: "),
                                   (good, [*good, "--isa", "foo"], "rank 1: generate: --isa: 'foo'"),
                                   (good, [*good, "-m", "/nowhere.gguf"], "rank 1: cannot open '/nowhere.gguf'")):
            begin = time.monotonic()
            for rc, out, err in mpi_runs("-n", "1", *command, ":", "-n", "1", *bad):
                self.assertNotEqual(rc, 0)
                self.assertIn("dcp-attn: " + said, err)
                self.assertEqual(err.count("dcp-attn: "), 1, err)
            self.assertLess(time.monotonic() - begin, 40)
        for rc, out, err in mpi_runs("-n", "2", *good, "--isa", "foo"):
            self.assertEqual((rc, err.count("'foo' is not right")), (2, 1), err)
        for rc, out, err in mpi_runs("-n", "2", EXE, "tokenize", "-m", "/nowhere.gguf", "-p", "a"):
            self.assertEqual((rc, err.count("nowhere")), (1, 1), err)

    def test_no_module_to_meet_with(self):
        """Ranks that cannot tell each other what is wrong: what all have is said once where the launcher ends the others, and what only another than the first has is said, too."""
        nowhere = ["env", "DCP_ATTN_MODULE_DIR=/nowhere"]
        bench = [EXE, "bench", "merge", "--shape", "1,1,1"]
        for bad, said in (([*bench, "--isa", "foo"], "--isa: 'foo' is not right"), ([EXE, "generate", "-m", "/nowhere.gguf", "-p", "a"], "cannot open '/nowhere.gguf'"),
                          (bench, "is neither beside the command nor in ../lib/dcpattn")):
            for rc, out, err in mpi_runs("-n", "3", *nowhere, *bad):
                self.assertNotEqual(rc, 0)
                n = len(re.findall("^dcp-attn", err, re.M))
                self.assertEqual((out, err.count(said)), ("", n), err)
                self.assertIn(n, (1, 3), err) # MPICH lets the others speak, too
        for rc, out, err in mpi_runs("-n", "1", *nowhere, *bench, ":", "-n", "2", *nowhere, *bench, "--isa", "foo"):
            self.assertNotEqual(rc, 0)
            self.assertIn("is neither beside the command nor in ../lib/dcpattn", err)
        if shutil.which("mpirun.openmpi"): # MPICH waits for a process that leaves without it
            for bad, said in ((["--isa", "foo"], "--isa: 'foo' is not right"), ([], "is neither beside the command nor in ../lib/dcpattn")):
                rc, out, err = next(iter(mpi_runs("-n", "1", *bench, ":", "-n", "1", *nowhere, *bench, *bad)))
                self.assertNotEqual(rc, 0)
                self.assertIn(said, err)

    def test_fault_point(self):
        rc, _, err = run("merge", "--lse-base", "e", "-o", self.out, *TWO_FILES, env={"DCP_ATTN_FAULT": "kill:mergers:0"})
        self.assertEqual(rc, 1)
        self.assertIn('"mergers"', err)
        self.assertIn(" merge ", err)

    def test_many_ranks(self):
        for n in (64, 300):
            rc, _, err = run("merge", "--comm", "shm", "--lse-base", "e", "-o", self.out, *(TWO_FILES * (n // 2)))
            self.assertEqual(rc, 0, err)


def readme():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        return f.read()


class Help(unittest.TestCase):
    def options(self, command):
        rc, out, err = run(*command.split(), "--help")
        self.assertEqual((rc, err), (0, ""))
        return re.findall(r"^  (?:-\w, |    )?(--[a-z-]+)", out, re.M), out

    def test_help_lists_options(self):
        for c in COMMANDS:
            names, text = self.options(c)
            self.assertIn("--help", [n for n in names] + re.findall(r"--help", text))
            self.assertTrue(text.startswith(f"Usage: dcp-attn {c}"))
            for line in text.split("\n"):
                self.assertLessEqual(len(line), 80, line)

    def test_readme_names_every_option(self):
        text = readme()
        for c in COMMANDS:
            self.assertTrue(f"dcp-attn {c}" in text or re.search(rf"{c.split()[0]} [a-z ,]*{c.split()[-1]}", text), c)
            for n in self.options(c)[0]:
                self.assertTrue(re.search(rf"{n}[`\\s]", text), f"README.md does not name {n} of {c}")

    def test_readme_names_no_other_option(self):
        known = {n for c in COMMANDS for n in self.options(c)[0]} | {"--help", "--version"}
        table = readme()
        table = table[table.index("## Options"):]
        table = table[:table.index("\n## ", 5)]
        for n in set(re.findall(r"`(?:-\w, )?(--[a-z-]+)", table)):
            self.assertIn(n, known)

    def test_info(self):
        rc, out, _ = run("info", "--json")
        self.assertEqual(rc, 0)
        said = json.loads(out)
        for key in ("version", "compiler", "features", "isa", "why_not_higher", "kernels", "topology", "groups", "huge_pages", "cpus_usable"):
            self.assertIn(key, said)
        self.assertTrue(any(k["family"] == "attention" for k in said["kernels"]))
        low = json.loads(run("info", "--json", "--isa", "scalar")[1])
        self.assertEqual(low["isa"], "scalar")
        self.assertTrue(all("avx" not in k["name"] for k in low["kernels"]))
        rc, out, _ = run("info")
        self.assertEqual(rc, 0)
        self.assertIn("kernels", out)


class Files(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()

    def tearDown(self):
        shutil.rmtree(self.dir)

    def path(self, name):
        return os.path.join(self.dir, name)

    def failed(self, args, *words):
        rc, out, err = run(*args)
        self.assertEqual(rc, 1, err)
        self.assertEqual(out, "")
        for w in words:
            self.assertIn(w, err)
        self.assertEqual([f for f in os.listdir(self.dir) if ".tmp" in f], [])

    def merge(self, *args, env=None):
        rc, out, err = run("merge", "--lse-base", "e", "--json", "-o", self.path("o"), *args, *TWO_FILES, env=env)
        self.assertEqual(rc, 0, err)
        return json.loads(out)

    def test_merge_json(self):
        said = self.merge()
        self.assertEqual(set(said), {"ranks", "algo", "why", "order", "comm", "cut", "nonfinite_values", "lse_bad", "lse_empty", "workspace_bytes", "wire_bytes"})
        self.assertEqual((said["ranks"], said["comm"], said["cut"]), (2, "shm", "heads"))

    def test_environment_and_flag(self):
        self.assertEqual(self.merge(env={"DCP_ATTN_CUT": "tokens"})["cut"], "tokens")
        self.assertEqual(self.merge("--cut", "none", env={"DCP_ATTN_CUT": "tokens"})["cut"], "none")
        self.assertEqual(self.merge("--comm=threads")["comm"], "threads")
        self.assertLessEqual(self.merge("--memory", "1M")["workspace_bytes"], 1 << 20)

    def test_merge_same_bits(self):
        seen = set()
        for args in (["--comm", "threads"], ["--comm", "shm"], ["--algo", "alltoall"], ["--algo", "direct"], ["--cut", "tokens"], ["--cut", "none"], ["--memory", "64K"]):
            self.merge(*args)
            with open(self.path("o"), "rb") as f:
                seen.add(f.read())
        self.assertEqual(len(seen), 1)

    def test_merge_order(self):
        for args, algo, order in (([], "direct", "rank"), (["--algo", "halving"], "halving", "halving"), (["--order", "rank"], "direct", "rank"),
                                  (["--order", "rank", "--algo", "alltoall"], "alltoall", "rank"), (["--order", "any"], "direct", "rank"),
                                  (["--order", "any", "--algo", "hierarchical"], "hierarchical", "host")):
            said = self.merge(*args)
            self.assertEqual((said["algo"], said["order"]), (algo, order), args)
        rc, _, err = run("merge", "--lse-base", "e", "-o", self.path("o"), "--algo", "halving", *TWO_FILES)
        self.assertEqual(rc, 0, err)
        self.assertIn("(halving, halving order, shm, cut by heads)", err)

    def test_missing_file(self):
        self.failed(["merge", "--lse-base", "e", "-o", self.path("o"), TWO_FILES[0], self.path("none")], self.path("none"), "rank 1")

    def test_wrong_tensors(self):
        self.failed(["merge", "--lse-base", "e", "-o", self.path("o"), os.path.join(GOLDEN, "attend", "sink", "in.safetensors")], "'out'")
        self.failed(["attend", "-o", self.path("o"), TWO_FILES[0]], "'q'")

    def test_files_disagree(self):
        other = os.path.join(GOLDEN, "merge", "odd-dims", "rank0.safetensors")
        self.failed(["merge", "--lse-base", "e", "-o", self.path("o"), TWO_FILES[0], other], TWO_FILES[0][-20:], "odd-dims/rank0.safetensors")

    def test_not_safetensors(self):
        for text in (b"", b"hello", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{}"):
            with open(self.path("bad"), "wb") as f:
                f.write(text)
            self.failed(["merge", "--lse-base", "e", "-o", self.path("o"), self.path("bad")], self.path("bad"))

    def test_output_folder_missing(self):
        self.failed(["merge", "--lse-base", "e", "-o", self.path("no/such/o"), *TWO_FILES], "no/such/o")

    def test_nonfinite_error(self):
        folder = os.path.join(GOLDEN, "merge", "nonfinite-zeroed")
        files = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.startswith("rank"))
        self.failed(["merge", "--lse-base", "e", "--nonfinite", "error", "-o", self.path("o"), *files], "rank")

    def test_full_disk(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        with open("/dev/full", "w") as full:
            p = subprocess.run([EXE, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(p.returncode, 1)
        self.assertIn("standard output", p.stderr)

    def test_unknown_model(self):
        rc, out, err = run("tokenize", "-m", "no-such-model", "-p", "x", env={"DCP_ATTN_CACHE": self.dir})
        self.assertEqual((rc, out), (1, ""))
        self.assertIn("scripts/fetch-model.sh no-such-model ", err)
        _, _, with_suffix = run("tokenize", "-m", "no-such-model.gguf", "-p", "x", env={"DCP_ATTN_CACHE": self.dir})
        self.assertEqual(with_suffix, err.replace("'no-such-model'", "'no-such-model.gguf'"))
        self.assertIn(self.dir, err)
        rc, out, err = run("tokenize", "-m", "./no/such/model.gguf", "-p", "x")
        self.assertEqual(rc, 1)
        self.assertIn("./no/such/model.gguf", err)


CACHE = os.environ.get("DCP_ATTN_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dcp-attn")
LAYERS, KV_ROW_BYTES, PAGE_TOKENS = 30, 3 * 64 * 2 * 2, 64  # of SmolLM2 135M: K and V, bf16


class Models(unittest.TestCase):
    def setUp(self):
        self.model = os.path.join(CACHE, "models", "smollm2-135m.gguf")
        if not os.path.exists(self.model):
            self.skipTest(f"no {self.model}; scripts/fetch-model.sh smollm2-135m fetches it")
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)

    def generate(self, *args):
        rc, out, err = run("generate", "-m", self.model, *args, timeout=300)
        self.assertEqual(rc, 0, err)
        return out, err

    def said(self, *args):
        return json.loads(self.generate("--json", *args)[0])

    def test_by_name(self):
        rc, out, err = run("tokenize", "-m", "smollm2-135m", "-p", "Hello", "--json", env={"DCP_ATTN_CACHE": CACHE})
        self.assertEqual(rc, 0, err)
        self.assertEqual(json.loads(out)["pieces"], ["Hello"])

    def test_bytes_that_are_no_text(self):
        path = os.path.join(self.dir, "bytes")
        with open(path, "wb") as f:
            f.write(b"a\xff\xc3\x28\xed\xa0\x80\xf0\x9f\x98\0z\xe2\x82")
        rc, out, err = run("tokenize", "-m", self.model, "-f", path, "--json")
        self.assertEqual(rc, 0, err)
        self.assertIn("\ufffd", "".join(json.loads(out)["pieces"]))

    def test_what_each_rank_owns(self):
        text = "word " * 300
        one = self.said("--raw", "-p", text, "--max-tokens", "1", "-n", "1")
        page_bytes = LAYERS * PAGE_TOKENS * KV_ROW_BYTES
        whole = one["table"][0]
        for n in (2, 3, 4):
            many = self.said("--raw", "-p", text, "--max-tokens", "1", "-n", str(n), "--interleave", str(1 + 15 * (n % 2)))
            self.assertEqual(many["ids"], one["ids"])
            table = many["table"]
            self.assertEqual([r["rank"] for r in table], list(range(n)))
            self.assertEqual(sum(r["kv_tokens"] for r in table), whole["kv_tokens"])
            for r in table:
                self.assertLessEqual(abs(r["kv_bytes"] - whole["kv_bytes"] / n), page_bytes)
                self.assertEqual(r["weight_bytes"], r["weight_share_bytes"] + r["weight_replicated_bytes"])
                self.assertEqual(r["weight_replicated_bytes"], table[0]["weight_replicated_bytes"])
            self.assertEqual(sum(r["weight_share_bytes"] for r in table) + table[0]["weight_replicated_bytes"], whole["weight_bytes"])
            for name in ("attn_k", "attn_v"):
                self.assertIn(name, many["replicated_weights"])
            self.assertGreater(many["merge_wire_bytes"], 0)

    def test_text_and_json_agree(self):
        args = ("-p", "Say hello with two emoji.", "--max-tokens", "24")
        out, err = self.generate(*args)
        said = self.said(*args)
        self.assertEqual(out, said["text"] + "\n")
        self.assertIn(said["stop"], ("end", "max-tokens"))
        for word in ("KV tokens", "peak RSS", "attention", "merge", "tokens/s"):
            self.assertIn(word, err)
        self.assertNotIn("\r", err)

    def test_seed_and_ranks(self):
        args = ("-p", "Tell me a story.", "--max-tokens", "12", "--temp", "1.5", "--top-k", "50", "--compute", "f32", "--kv-dtype", "f32")
        first = self.said(*args, "--seed", "7")["ids"]
        self.assertEqual(self.said(*args, "--seed", "7")["ids"], first)
        self.assertEqual(self.said(*args, "--seed", "7", "-n", "3", "--comm", "threads")["ids"], first)
        self.assertNotEqual(self.said(*args, "--seed", "8")["ids"], first)

    def test_context(self):
        said = self.said("--raw", "-p", "one two three four", "-c", "6", "--max-tokens", "50")
        self.assertEqual(said["stop"], "context")
        self.assertEqual(len(said["ids"]), 3)
        rc, _, err = run("generate", "-m", self.model, "--raw", "-p", "one two three four", "-c", "3")
        self.assertEqual(rc, 1)
        self.assertIn("--context is 3", err)

    def test_empty_prompt(self):
        path = os.path.join(self.dir, "empty")
        open(path, "w").close()
        rc, _, err = run("perplexity", "-m", self.model, "-f", path)
        self.assertEqual(rc, 1)
        self.assertIn("at least 2", err)


if __name__ == "__main__":
    unittest.main()
