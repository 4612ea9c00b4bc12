"use strict";

// What a heatmap's column is, in the page and in plotly's labels.
class HeatmapText {
  // text of tokens and names go into the page by textContent alone
  static element(tag, name, ...children) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...children);
    return made;
  }

  // plotly reads markup in what it shows
  static inert(text) {
    return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  }

  static nat(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    return size < 1e-4 ? value.toExponential(1) : size < 10 ? value.toFixed(4) : value.toFixed(2);
  }

  static unit(heatmap) {
    return heatmap.unit === "relative" ? "of its size" : heatmap.unit;
  }

  // position of the row whose value a column shows at a boundary
  static worst(heatmap, line, column) {
    const start = heatmap.columns[column][1];
    return heatmap.worst.length ? start + heatmap.worst[line][column] : start;
  }
}

// Shows one token: what was read and predicted, its log-probs, and its column by layer.
class TokenPanel {
  static BEFORE = 24;
  static AFTER = 16;

  constructor(section, data, look) {
    this.section = section;
    this.data = data;
    this.look = look;
    this.chart = null;
  }

  say(title, text) {
    this.replace(HeatmapText.element("h4", "", title), HeatmapText.element("p", "", text));
  }

  // `column` is -1 where the heatmap has none of this position; `open` is called with another one
  show(heatmap, sequence, position, column, [first, last], open) {
    const { name } = this.data.sequences[sequence];
    this.replace(
      HeatmapText.element("h4", "", `${name}: position ${position} read, ${position + 1} predicted`),
      this.steps(position, first, last, open),
      this.facts(heatmap, sequence, position, column),
      this.context(sequence, position),
    );
    if (column >= 0) this.draw(heatmap, column);
  }

  replace(...parts) {
    if (this.chart) Plotly.purge(this.chart);
    this.chart = null;
    this.section.replaceChildren(...parts);
  }

  steps(position, first, last, open) {
    const made = HeatmapText.element("p", "steps");
    for (const [text, to] of [["Previous token", position - 1], ["Next token", position + 1]]) {
      const button = HeatmapText.element("button", "", text);
      button.type = "button";
      button.disabled = to < first || to > last;
      button.addEventListener("click", () => {
        open(to);
        // the button that was pressed is gone, and so is the focus
        const again = [...this.section.querySelectorAll(".steps button")];
        (again.find((one) => one.textContent === text && !one.disabled) ?? again.find((one) => !one.disabled))?.focus();
      });
      made.append(button, " ");
    }
    return made;
  }

  token(sequence, position) {
    const { start, tokens } = this.data.sequences[sequence];
    const id = tokens[position - start];
    if (id === undefined) return null;
    const shown = this.data.text === null ? String(id) : this.data.text[id];
    const made = HeatmapText.element("bdi", "token", shown);
    made.title = `token ${id}, position ${position}`;
    return { id, made };
  }

  facts(heatmap, sequence, position, column) {
    const { start, first, second } = this.data.sequences[sequence];
    const rows = [];
    const { element, nat } = HeatmapText;
    const add = (name, ...said) => rows.push(element("div", "", element("dt", "", name), element("dd", "", ...said)));
    const scored = (value) => (value === null ? "not captured" : `${nat(value)} nat`);
    const named = (at) => {
      const found = this.token(sequence, at);
      if (!found) return ["not captured"];
      return this.data.text === null ? ["ID ", found.made] : [found.made, ` ID ${found.id}`];
    };
    add(`token read, position ${position}`, ...named(position));
    add(`token predicted, position ${position + 1}`, ...named(position + 1));
    const scores = [first, second].map((one) => one[position + 1 - start] ?? null);
    const [a, b] = this.data.labels;
    add(`log-prob, ${a}`, scored(scores[0]));
    add(`log-prob, ${b}`, scored(scores[1]));
    if (!scores.includes(null)) add(`${a} minus ${b}`, scored(scores[0] - scores[1]));
    if (column >= 0) add(heatmap.measure, this.layers(heatmap, column));
    else add(heatmap.measure, "no column of the heatmap has this position");
    const width = column >= 0 ? heatmap.columns[column][2] - heatmap.columns[column][1] : 1;
    if (width > 1) add("column", this.shared(heatmap, column));
    return element("dl", "facts", ...rows);
  }

  layers(heatmap, column) {
    const { values, boundaries } = heatmap;
    const unit = HeatmapText.unit(heatmap);
    const measured = boundaries.map((layer, line) => [layer, values[line][column]]).filter(([, value]) => value !== null);
    if (!measured.length) return "not measured";
    const [layer, most] = measured.reduce((best, one) => (one[1] > best[1] ? one : best));
    if (most === 0) return "0 at all boundaries: the sides are the same";
    const rises = measured.slice(1).map(([to, value], at) => [value - measured[at][1], measured[at], [to, value]]);
    const said = `largest into layer ${layer}, ${most} ${unit}`;
    if (!rises.length) return said;
    const [rise, [from, before], [to, after]] = rises.reduce((best, one) => (one[0] > best[0] ? one : best));
    if (rise <= 0) return said;
    const where = to - from === 1 ? `layer ${from}` : `layers ${from} to ${to - 1}`;
    return `${said}; it rises most over ${where}, from ${before} to ${after}`;
  }

  shared(heatmap, column) {
    const [, start, stop] = heatmap.columns[column];
    const lines = heatmap.values.map((_, line) => line).filter((line) => heatmap.values[line][column] !== null);
    const said = `stands for positions ${start} to ${stop - 1}; at each layer it shows the largest of them`;
    if (!lines.length) return said;
    const worst = lines.reduce((best, one) => (heatmap.values[one][column] > heatmap.values[best][column] ? one : best));
    return `${said}, the worst of all being that of position ${HeatmapText.worst(heatmap, worst, column)}`;
  }

  context(sequence, position) {
    const { start, tokens } = this.data.sequences[sequence];
    const made = HeatmapText.element("p", "tokens");
    const from = Math.max(position - TokenPanel.BEFORE, start);
    const to = Math.min(position + TokenPanel.AFTER, start + tokens.length - 1);
    if (from > start) made.append("... ");
    for (let at = from; at <= to; at += 1) {
      const { made: one } = this.token(sequence, at);
      if (at === position) made.append(HeatmapText.element("mark", "read", one));
      else if (at === position + 1) made.append(HeatmapText.element("mark", "predicted", one));
      else made.append(one);
      made.append(" ");
    }
    if (to < start + tokens.length - 1) made.append("...");
    const said = this.data.text === null
      ? "Marked are the token read and the one predicted from it. These are IDs: layerbisect report --tokenizer DIR shows text."
      : "Marked are the token read and the one predicted from it.";
    return HeatmapText.element("div", "around", made, HeatmapText.element("p", "note", said));
  }

  draw(heatmap, column) {
    const { values, boundaries, measure, unit } = heatmap;
    const where = HeatmapText.element("div", "chart");
    this.section.append(where);
    this.chart = where;
    where.setAttribute("role", "img");
    where.setAttribute("aria-label", `${measure} by layer boundary for this column`);
    const { font } = this.look;
    Plotly.newPlot(where, [{
      type: "scatter", mode: "lines+markers", x: boundaries, y: values.map((row) => row[column]),
      line: { color: "#0072B2" }, hovertemplate: "into layer %{x}: %{y:.3g}<extra></extra>",
    }], {
      font, height: 220, margin: { l: 64, r: 16, t: 8, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { title: { text: "layer boundary" }, zeroline: false },
      yaxis: { title: { text: `${measure}, ${unit}` }, zeroline: false, rangemode: "tozero" },
    }, { displayModeBar: false, responsive: true });
  }
}
