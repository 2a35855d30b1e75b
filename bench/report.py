"""The two forms of a comparison: a Markdown table and an SVG plot, both of the record that bench/compare appends to its
results."""

import html
import statistics

MIB = 1 << 20


def spread(engine, key):
    """(least, median, greatest) of the runs that have a figure, or None."""
    values = [run[key] for run in engine["runs"] if run.get(key) is not None]
    return (min(values), statistics.median(values), max(values)) if values else None


def rate(engine, key):
    found = spread(engine, key)
    return "-" if found is None else f"{found[1]:.2f} ({found[0]:.2f} - {found[2]:.2f})"


def mebibytes(engine, key):
    found = spread(engine, key)
    return "-" if found is None else f"{found[1] / MIB:.0f} MiB"


def outcome(engine):
    """"5 of 5 done", "5 of 5 killed, out of memory"."""
    kinds = [run["outcome"] for run in engine["runs"]]
    return "; ".join(f"{kinds.count(kind)} of {len(kinds)} {kind}" for kind in dict.fromkeys(kinds))


def same_answer(engine):
    known = [run["same_answer"] for run in engine["runs"] if run.get("same_answer") is not None]
    return "-" if not known else "yes" if all(known) else f"no ({known.count(False)} of {len(known)})"


def markdown(record):
    limit = "none" if record["limit_bytes"] is None else f"{record['limit_bytes'] / MIB:.0f} MiB (cgroup v{record['cgroup']})"
    lines = [
        f"{record['program']}, {record['when']}",
        f"{record['processor']}, {record['threads']} threads; drive {record['drive']}",
        f"model {record['model']} ({record['model_bytes'] / MIB:.0f} MiB), budget {record['budget']}, memory limit {limit}",
        f"prompt {record['prompt_chars']} characters, {record['gen_tokens']} tokens generated; "
        + ("every run with the model's files out of the page cache" if record["cold"]
           else "NOTE: the files could not be put out of the page cache before every run"),
    ]
    lines += [f"NOTE: {note}" for note in record["notes"]]
    lines += ["", "| engine | outcome | prompt tokens/s | answer tokens/s | whole run, s | read from disk | peak memory | same answer |",
              "|---|---|---|---|---|---|---|---|"]
    for engine in record["engines"]:
        lines.append(f"| {engine['name']} | {outcome(engine)} | {rate(engine, 'prompt_rate')} | {rate(engine, 'answer_rate')} | "
                     f"{rate(engine, 'seconds')} | {mebibytes(engine, 'read_bytes')} | {mebibytes(engine, 'peak_rss_bytes')} | "
                     f"{same_answer(engine)} |")
    lines += ["", "Median (least - greatest). Same answer: the text of the first run that was done."]
    return "\n".join(lines) + "\n"


BAR, GAP, LEFT, WIDTH, TOP = 22, 14, 150, 460, 82
COLOURS = ("#7a7a7a", "#b0b0b0", "#3a7ca5", "#81a4cd", "#16425b", "#2f6690")


def bars(record, key, title, top):
    """One block of bars with whiskers from least to greatest; its SVG and its height."""
    found = [(engine, spread(engine, key)) for engine in record["engines"]]
    largest = max((one[2] for _, one in found if one), default=0) or 1
    parts = [f'<text x="10" y="{top}" font-weight="bold">{title}</text>']
    for row, (engine, one) in enumerate(found):
        y = top + 12 + row * (BAR + GAP)
        middle = y + BAR / 2
        parts.append(f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{html.escape(engine["name"])}</text>')
        if one is None:
            parts.append(f'<text x="{LEFT}" y="{middle + 4}" fill="#a33">{html.escape(outcome(engine))}</text>')
            continue
        low, median, high = (WIDTH * value / largest for value in one)
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{median:.1f}" height="{BAR}" fill="{COLOURS[row % len(COLOURS)]}"/>')
        parts.append(f'<path d="M{LEFT + low:.1f} {middle} H{LEFT + high:.1f}" stroke="black"/>')
        parts.append(f'<text x="{LEFT + high + 8:.1f}" y="{middle + 4}">{one[1]:.2f}</text>')
    return parts, 12 + len(found) * (BAR + GAP) + 24


def svg(record):
    limit = "no memory limit" if record["limit_bytes"] is None else f"memory limit {record['limit_bytes'] / MIB:.0f} MiB"
    head = f"{record['model']}, budget {record['budget']}, {limit}, {'cold' if record['cold'] else 'not cold'}"
    parts = [f'<text x="10" y="20" font-weight="bold">{html.escape(head)}</text>',
             f'<text x="10" y="38" fill="#555">{html.escape(record["processor"])}, {record["threads"]} threads, '
             f'{html.escape(record["drive"])}</text>',
             f'<text x="10" y="54" fill="#555">{html.escape(record["program"])}</text>']
    top = TOP
    for key, title in (("prompt_rate", "Prompt, tokens/s"), ("answer_rate", "Answer, tokens/s")):
        block, height = bars(record, key, title, top)
        parts += block
        top += height
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{top}" '
            'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
            + "\n".join(parts) + "\n</svg>\n")
