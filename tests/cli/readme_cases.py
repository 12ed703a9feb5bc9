# SPDX-License-Identifier: Apache-2.0
"""Tests of what README.md says about options, the environment and files; test_cli.py runs them."""
import os, re, subprocess, unittest

from output_cases import COMMANDS, ROOT, environment

EXE = None  # set by test_cli.py
WITH_RANKS = [c for c in COMMANDS if c not in ("tokenize", "info")]
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_")


def readme():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        return f.read()


def rows(text, header):
    """Cells of the table whose first line begins with header."""
    lines = text[text.index(header):].split("\n\n")[0].split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]


def commands(text):
    """'merge, bench attend, extend': the commands that README's table means by it."""
    text, *but = text.split(" but ")
    found, prefix = [], ""
    for item in text.split(", "):
        if item == "all":
            found += COMMANDS
        elif item == "all with ranks":
            found += WITH_RANKS
        else:
            if item.startswith("bench "):
                item, prefix = item[len("bench "):], "bench "
            found.append(prefix + item)
    return [c for c in found if not but or c not in commands(but[0])]


class Readme(unittest.TestCase):
    def test_who_has_which_option(self):
        has, letters = {}, {}
        for c in COMMANDS:
            p = subprocess.run([EXE, *c.split(), "--help"], capture_output=True, text=True, env=environment())
            self.assertEqual(p.returncode, 0, p.stderr)
            for letter, name in re.findall(r"^  (?:(-\w), |    )(--[a-z-]+)", p.stdout, re.M):
                if name != "--help":
                    has.setdefault(name, set()).add(c)
                    letters.setdefault(name, set()).add(letter)
        said = {}
        for options, of, _ in rows(readme(), "| option |"):
            for c in commands(of):
                self.assertIn(c, COMMANDS, of)
            for letter, name in re.findall(r"`(?:(-\w), )?(--[a-z-]+)`", options):
                self.assertNotIn(name, said, "two lines")
                said[name] = set(commands(of))
                self.assertIn(letter, letters.get(name, ()), name)
        for name in sorted({*has, *said}):
            self.assertEqual(sorted(said.get(name, ())), sorted(has.get(name, ())), f"README.md: who has {name}")

    def test_every_variable_of_the_environment(self):
        """Names in getenv, and those that begin as ours or a launcher's do and reach it by a variable."""
        read = set()
        for top in ("src", "engine", "cli"):
            for folder, _, files in os.walk(os.path.join(ROOT, top)):
                for name in files:
                    if not name.endswith((".c", ".h", ".inc")):
                        continue
                    with open(os.path.join(folder, name), encoding="utf-8") as f:
                        text = f.read()
                    read.update(re.findall(r"getenv\(\"(\w+)\"\)", text))
                    read.update(n for n in re.findall(r"\"([A-Z][A-Z0-9_]+)\"", text) if n.startswith(("DCP_ATTN_", *LAUNCHERS)))
        self.assertGreater(len(read), 10)
        said = set()
        for names, _, _ in rows(readme(), "| variable |"):
            said.update(re.findall(r"`([A-Z0-9_]+)`", names))
        self.assertEqual(sorted(said), sorted(read))

    def test_using_it_on_a_fresh_machine(self):
        """A model is fetched before a line uses it, by a name that the script has; a file that is read is in the tree."""
        block = readme().split("## Using it")[1].split("\n## ")[0]
        there = subprocess.run([os.path.join(ROOT, "scripts", "fetch-model.sh"), "--list"], capture_output=True, text=True).stdout
        there, fetched, used = set(re.findall(r"^(\S+)", there, re.M)), set(), 0
        for line in re.findall(r"^    (.+)$", block, re.M):
            fetched.update(re.findall(r"fetch-model\.sh (\S+)", line))
            for model in re.findall(r" -m (\S+)", line):
                self.assertIn(model, fetched, line)
                used += 1
            for name in re.findall(r" -f (\S+)", line) + re.findall(r"^(scripts/\S+)", line):
                self.assertTrue(os.path.exists(os.path.join(ROOT, name)), line)
        self.assertTrue(fetched and fetched <= there, fetched)
        self.assertGreater(used, 3)

    def test_every_document_and_example(self):
        """Each is named, documents by a link."""
        text = readme()
        for name in os.listdir(os.path.join(ROOT, "docs")):
            if name.endswith(".md"):
                self.assertTrue(f"](docs/{name})" in text, f"README.md does not link docs/{name}")
        named = [re.findall(r"`(\w+\.c)`", row[0])[0] for row in rows(text, "| example |")]
        self.assertEqual(sorted(named), sorted(n for n in os.listdir(os.path.join(ROOT, "examples")) if n.endswith(".c")))
