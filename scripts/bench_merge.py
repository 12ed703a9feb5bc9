#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The merge's table in BENCHMARKS.md and the plot bench-merge.svg, from files of `dcp-attn bench merge --json`.
Usage: bench_merge.py DOCS_FOLDER RUN.json..."""
import datetime, json, math, os, subprocess, sys

BEGIN, END = "<!-- merge: written by make bench-merge -->", "<!-- end of merge -->"
INTRO = """# Benchmarks

"""


def bytes_text(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024


def number(x, digits=3):
    if x is None:
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.{digits}g}"


def commit():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "-C", root, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout.strip()
        return head + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def title(name, rows, machine):
    r = rows[0]
    kind = {"mpi": "under Open MPI", "shm": "processes of one host (shm)", "threads": "threads"}[r["comm"]]
    if "private" in name:
        kind += ", no memory shared between ranks: all goes through MPI messages"
    place = "in place" if r["in_place"] else "contiguous result"
    return f"{r['ranks']} ranks, {kind}, {place}. Bound: {machine['pinning']}; load {machine['load_before']:.1f} before, {machine['load_after']:.1f} after."


def table(rows):
    out = ["| T,H,D | type | algorithm | min us | median us | algo GB/s | bus GB/s | x read (median, min) | speed-up | speed-up over MPI | wrong |",
           "|---|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        speed = number(r["speedup"])
        if r["speedup"] is not None and r["speedup"] < 1 and not r["published"]:
            speed = f"**{speed}**"
        out.append("| " + " | ".join([",".join(map(str, r["shape"])), r["dtype"], r["algo"], number(r["time_us"]["min"]), number(r["time_us"]["median"]),
                                      number(r["algo_GBps"]), number(r["bus_GBps"]), f"{number(r['read_time_ratio'])}, {number(r['read_time_ratio_min'])}",
                                      speed, number(r["speedup_mpi"]), str(r["wrong"])]) + " |")
    return out


def memory_table(rows):
    out = ["| T,H,D | type | algorithm | partial of a rank | workspace | counted extra | growth of PSS | growth of resident peak | with the partial |",
           "|---|---|---|---|---|---|---|---|---|"]
    elem = {"f32": 4, "bf16": 2, "f16": 2}
    for r in rows:
        partial = math.prod(r["shape"]) * elem[r["dtype"]]
        ran = r["time_us"]["min"] is not None
        grown = [bytes_text(r[k]) if ran and r[k] >= 0 else "-" for k in ("pss_growth_bytes", "resident_growth_bytes")]
        out.append("| " + " | ".join([",".join(map(str, r["shape"])), r["dtype"], r["algo"], bytes_text(partial), bytes_text(r["workspace_bytes"]),
                                      bytes_text(r["peak_extra_bytes"])] + grown + [bytes_text(partial + r["peak_extra_bytes"])]) + " |")
    return out


def losing(runs):
    lines = []
    for name, run in runs:
        for r in run["rows"]:
            if r["speedup"] is not None and r["speedup"] < 1 and not r["published"]:
                lines.append(f"- {name}: {r['algo']} at {','.join(map(str, r['shape']))} {r['dtype']}: {r['speedup']:.2f} times the published form's speed")
    return lines or ["- none in this run"]


def section(runs):
    machine = runs[0][1]["machine"]
    n_cpus = max(run["machine"]["cpus_usable"] for _, run in runs)  # mpirun binds its ranks: they see one each
    out = [BEGIN, "", "## The merge", "",
           f"{machine['cpu']}, {n_cpus} usable CPUs; commit {commit()}, {datetime.date.today().isoformat()}; plain read "
           f"{machine['read_GBps']:.1f} GB/s, all ranks together, at the largest shape of the first run.", "",
           "`make bench-merge` writes this section. In each iteration every rank rewrites its partial, all meet, then call; an iteration's time, the read's too, is "
           "from the first rank's start to the last one's end. All algorithms and the plain read take turns in one run. *x read*: time over the best plain read loop over exactly the bytes "
           "that each rank must read. *Speed-up*: the faster published form's median over this one's, same ranks, same run (bold: it loses). *algo GB/s*: "
           "bytes of one rank's partial over the median; *bus GB/s*: that times (N - 1) / N. *wrong*: sampled elements beyond rounding. Where ranks outnumber "
           "the CPUs, all times hold the scheduler's turns as well. Median over min tells the noise of the machine; figures with a load well above the "
           "number of ranks say little.", "", "![time over size](bench-merge.svg)", ""]
    large = []
    for name, run in runs:
        if "large" in name:
            large = run["rows"]
            continue
        out += ["### " + title(name, run["rows"], run["machine"]), ""] + table(run["rows"]) + [""]
    out += ["### Where the published form wins", ""] + losing([x for x in runs if "large" not in x[0]]) + [""]
    out += ["### Memory", "", "Bytes of a rank beyond its partial, the largest of the ranks: what create reports, the counted allocator's high-water mark "
            "over creation and two runs, and what the kernel saw (proportional set size after the runs; resident peak, which also holds what MPI "
            "allocates inside and shared pages that were touched for the first time).", ""]
    if large:
        if any(r["time_us"]["min"] is None for r in large):
            out += ["Rows without growth were not run at this size: their bytes are those that create takes.", ""]
        out += memory_table(large) + [""]
    first = [r for r in runs[0][1]["rows"] if r["shape"] == [512, 96, 512]]
    if first:
        out += memory_table(first) + [""]
    return "\n".join(out + [END])


COLOURS = ["#1b6ca8", "#c8553d", "#588157", "#7b2cbf", "#b08900", "#444444", "#00798c"]


def decades(lo, hi):
    return [10.0 ** e for e in range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)]


def svg(run):
    """Median time over bytes of a rank's partial, both logarithmic."""
    elem = {"f32": 4, "bf16": 2, "f16": 2}
    series = {}
    for r in run["rows"]:
        if r["dtype"] != "f32" or r["time_us"]["median"] is None:
            continue
        size = math.prod(r["shape"]) * elem[r["dtype"]]
        series.setdefault(r["algo"], []).append((size, r["time_us"]["median"], r["time_us"]["min"]))
        series.setdefault("plain read", []).append((size, r["read_us"]["median"], r["read_us"]["min"]))
    series = {k: sorted(set(v)) for k, v in series.items()}
    xs = [p[0] for v in series.values() for p in v]
    ys = [y for v in series.values() for p in v for y in p[1:]]
    left, top, width, height = 70, 40, 560, 360
    x_decades, y_decades = decades(min(xs), max(xs)), decades(min(ys), max(ys))
    x_lo, x_hi, y_lo, y_hi = math.log10(x_decades[0]), math.log10(x_decades[-1]), math.log10(y_decades[0]), math.log10(y_decades[-1])

    def px(x):
        return left + (math.log10(x) - x_lo) / (x_hi - x_lo) * width

    def py(y):
        return top + height - (math.log10(y) - y_lo) / (y_hi - y_lo) * height

    r0 = run["rows"][0]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 150}" height="{top + height + 60}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{left}" y="22" font-size="14">Merge of {r0["ranks"]} partials, f32, {r0["comm"]}, '
           f'{"in place" if r0["in_place"] else "contiguous result"}: median time (whisker down to the least)</text>']
    for x in x_decades:
        out.append(f'<line x1="{px(x):.1f}" y1="{top}" x2="{px(x):.1f}" y2="{top + height}" stroke="#ddd"/>')
        out.append(f'<text x="{px(x):.1f}" y="{top + height + 18}" text-anchor="middle">{x:.0e}</text>')
    for y in y_decades:
        out.append(f'<line x1="{left}" y1="{py(y):.1f}" x2="{left + width}" y2="{py(y):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    out.append(f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">bytes of one rank\'s partial</text>')
    out.append(f'<text x="18" y="{top + height / 2}" text-anchor="middle" transform="rotate(-90 18 {top + height / 2})">microseconds</text>')
    for i, (name, points) in enumerate(series.items()):
        colour = "#999" if name == "plain read" else COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if name == "plain read" else ""
        path = " ".join(f"{px(p[0]):.1f},{py(p[1]):.1f}" for p in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for p in points:
            out.append(f'<line x1="{px(p[0]):.1f}" y1="{py(p[1]):.1f}" x2="{px(p[0]):.1f}" y2="{py(p[2]):.1f}" stroke="{colour}"/>')
            out.append(f'<circle cx="{px(p[0]):.1f}" cy="{py(p[1]):.1f}" r="3" fill="{colour}"/>')
        y = top + 14 + 20 * i
        out.append(f'<line x1="{left + width + 12}" y1="{y - 4}" x2="{left + width + 36}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{left + width + 42}" y="{y}">{name}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    docs, runs = sys.argv[1], []
    for path in sys.argv[2:]:
        with open(path, encoding="utf-8") as f:
            runs.append((os.path.splitext(os.path.basename(path))[0].split("-", 1)[-1], json.load(f)))
    page = os.path.join(docs, "BENCHMARKS.md")
    text = INTRO
    if os.path.exists(page):
        with open(page, encoding="utf-8") as f:
            text = f.read()
    new = section(runs)
    if BEGIN in text and END in text:
        text = text[:text.index(BEGIN)] + new + text[text.index(END) + len(END):]
    else:
        text = text.rstrip("\n") + "\n\n" + new + "\n"
    with open(page, "w", encoding="utf-8") as f:
        f.write(text)
    with open(os.path.join(docs, "bench-merge.svg"), "w", encoding="utf-8") as f:
        f.write(svg(runs[0][1]))
    print(f"wrote {page} and bench-merge.svg")


if __name__ == "__main__":
    main()
