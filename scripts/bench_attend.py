#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention's tables in BENCHMARKS.md and the plot bench-attend.svg, from files of `dcp-attn bench attend|extend|product|generate --json`.
Usage: bench_attend.py DOCS_FOLDER RUN.json..."""
import datetime, json, math, os, sys

sys.dont_write_bytecode = True
from bench_merge import COLOURS, INTRO, bytes_text, commit, number

BEGIN, END = "<!-- attention: written by make bench-attend -->", "<!-- end of attention -->"
TITLES = {"attend": "One rank: single tokens and products", "attend-ranks": "A rank per CPU", "extend": "A chunk of new tokens",
          "context": "Context, single tokens", "context-mla": "Context, single tokens, MLA", "context-extend": "Context, 512 new tokens", "ranks": "Ranks, one thread each",
          "types": "Types of keys and values", "isa": "Instruction-set levels", "products": "Products on quantised weights",
          "products-exact": "Products, activations in float32"}


def count(n):
    return "-" if n is None else f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)


def percent(x):
    return "-" if x is None else f"{100 * x:.1f}%"


def split(r):
    parts = r["split_us"]
    total = sum(x or 0 for x in parts.values())
    return "-" if r["case"] == "product" or not total else " / ".join(f"{100 * (parts[k] or 0) / total:.0f}" for k in ("gather", "partial", "merge"))


def table(rows):
    out = ["| case | keys | T | ranks x threads | type | isa | min us | median us | of plain read | of matrix peak | gather / partial / merge % "
           "| workspace | peak extra | PSS growth | error | wrong |", "|" + "---|" * 16]
    for r in rows:
        mark = " (disturbed)" if r["disturbed"] else ""
        out.append("| " + " | ".join([
            r["case"], bytes_text(r["read_bytes"]) if r["keys"] is None else count(r["keys"]), str(r["tokens"]), f"{r['ranks']} x {r['threads']}", r["dtype"],
            r["isa"], number(r["time_us"]["min"]), number(r["time_us"]["median"]), percent(r["read_fraction"]) + mark, percent(r["matrix_fraction"]) + mark, split(r),
            bytes_text(r["workspace_bytes"]), bytes_text(r["peak_extra_bytes"]), bytes_text(max(r["pss_growth_bytes"], 0)), f"{r['worst_error']:.0e}",
            str(r["wrong"])]) + " |")
    return out


def generate_table(runs):
    out = ["| model | test | ranks x threads | tokens/s median | best | attention / merge / gather / products / other % | workspace | KV of a rank | peak counted |",
           "|" + "---|" * 9]
    for _, run in runs:
        for r in run["rows"]:
            shares = " / ".join(f"{100 * r[k + '_share']:.0f}" for k in ("attend", "merge", "gather", "dense", "other"))
            out.append("| " + " | ".join([os.path.splitext(os.path.basename(run["model"]))[0], r["test"], f"{r['ranks']} x {r['threads']}",
                                          number(r["tokens_per_s_median"], 4), number(r["tokens_per_s_best"], 4), shares, bytes_text(r["workspace_bytes"]),
                                          bytes_text(r["kv_bytes"]), bytes_text(r["peak_bytes"])]) + " |")
    return out


def section(runs, models):
    m = runs[0][1]["machine"]
    peaks = ", ".join(f"{k} {v:,.0f}" for k, v in m["peaks_GFLOPs"].items())
    out = [BEGIN, "", "## Attention and products", "",
           f"{m['cpu']}, {m['cpus_usable']} usable CPUs{'; ' + m['not_higher'] if m['not_higher'] else ''}; commit {commit()}, "
           f"{datetime.date.today().isoformat()}; load {m['load_before']:.1f} before the first run. Plain read {m['read_GBps']:.1f} GB/s at best; multiply-adds on "
           f"random data, GFLOP/s: {peaks}.", "",
           "`make bench-attend` writes this section. Attention, plain reads of the same bytes and the loop that shows the matrix peak take turns in the same "
           "rounds, on the same CPUs; an iteration's time is from the first rank's start to the last one's end. Keys lie in as many copies as make 1 GiB, so that each run reads memory. "
           "*of plain read*: median time of a plain read of all ranks' keys and values (of the matrix), the faster of its loops, over the median time. *of matrix peak*: "
           "multiply-adds per second over the best of the machine's units. *error*: the largest of sampled outputs against an oracle in double, over the "
           "largest value (products: over their rms); *wrong*: elements beyond what the arithmetic allows. Memory: the largest rank's, beyond its "
           "queries, keys and result. Where ranks outnumber the CPUs, times hold the scheduler's turns as well; median over min tells the noise. "
           "*(disturbed)*: other work had the CPUs, as the matrix peak's median below 0.85 of the best of its rounds or 0.7 of the best of all, or a median of more than twice its minimum, "
           "tells; fractions say little then.", "",
           "![fractions of the roofs over context](bench-attend.svg)", ""]
    for name, run in runs:
        out += ["### " + TITLES.get(name, name), ""] + table(run["rows"]) + [""]
    if models:
        out += ["### Generation", "", "Names as other benches have them: ppN a prompt of N tokens, tgN are N tokens one at a time, @ dD with D tokens in the "
                "cache before. Shares of time are rank 0's.", ""] + generate_table(models) + [""]
    return "\n".join(out + [END])


def svg(runs):
    """Fraction of plain read (decode) and of the matrix peak (MLA, extend) over keys."""
    series = {}
    for name, run in runs:
        if not name.startswith("context"):
            continue
        for r in run["rows"]:
            is_read = r["case"] == "gqa-decode"
            value = r["read_fraction"] if is_read else r["matrix_fraction"]
            if value is not None:
                series.setdefault(r["case"] + (", of plain read" if is_read else ", of matrix peak"), []).append((r["keys"], value))
    if not series:
        return None
    xs = [math.log2(x) for v in series.values() for x, _ in v]
    x_lo, x_hi = min(xs), max(max(xs), min(xs) + 1)
    left, top, width, height = 70, 40, 560, 360
    y_hi = max(1.0, max(y for v in series.values() for _, y in v))

    def px(x):
        return left + (math.log2(x) - x_lo) / (x_hi - x_lo) * width

    def py(y):
        return top + height - y / y_hi * height

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 230}" height="{top + height + 60}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{left}" y="22" font-size="14">Attention beside the machine\'s roofs, measured in the same rounds (medians)</text>']
    for e in range(math.ceil(x_lo), math.floor(x_hi) + 1):
        out.append(f'<line x1="{px(2 ** e):.1f}" y1="{top}" x2="{px(2 ** e):.1f}" y2="{top + height}" stroke="#ddd"/>')
        out.append(f'<text x="{px(2 ** e):.1f}" y="{top + height + 18}" text-anchor="middle">{count(2 ** e)}</text>')
    for i in range(int(y_hi * 10 + 1e-9) // 2 + 1):
        y = i / 5
        out.append(f'<line x1="{left}" y1="{py(y):.1f}" x2="{left + width}" y2="{py(y):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{100 * y:.0f}%</text>')
    out.append(f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">keys of the sequence</text>')
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = sorted(points)
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = top + 14 + 20 * i
        out.append(f'<line x1="{left + width + 12}" y1="{y - 4}" x2="{left + width + 36}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{left + width + 42}" y="{y}">{name}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    docs, runs, models = sys.argv[1], [], []
    for path in sys.argv[2:]:
        with open(path, encoding="utf-8") as f:
            run = json.load(f)
        name = os.path.splitext(os.path.basename(path))[0].split("-", 1)[-1]
        (models if "model" in run else runs).append((name, run))
    page = os.path.join(docs, "BENCHMARKS.md")
    text = INTRO
    if os.path.exists(page):
        with open(page, encoding="utf-8") as f:
            text = f.read()
    new = section(runs, models)
    if BEGIN in text and END in text:
        text = text[:text.index(BEGIN)] + new + text[text.index(END) + len(END):]
    else:
        text = text.rstrip("\n") + "\n\n" + new + "\n"
    with open(page, "w", encoding="utf-8") as f:
        f.write(text)
    plot = svg(runs)
    if plot is not None:
        with open(os.path.join(docs, "bench-attend.svg"), "w", encoding="utf-8") as f:
            f.write(plot)
    print(f"wrote {page}" + ("" if plot is None else " and bench-attend.svg"))


if __name__ == "__main__":
    main()
