"use strict";
(() => {
  const CONFIG = { displayModeBar: false, responsive: true };
  const CURSOR = "#D55E00";
  const BEFORE = 24;
  const AFTER = 16;
  const blocks = [];

  // text of tokens and names go into the page by textContent alone
  const element = (tag, name, ...children) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...children);
    return made;
  };
  // plotly reads markup in what it shows
  const inert = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const digits = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    return size < 1e-4 ? value.toExponential(1) : size < 10 ? value.toFixed(4) : value.toFixed(2);
  };

  class HeatmapBlock {
    constructor(figure) {
      this.figure = figure;
      this.chart = figure.querySelector(".chart");
      this.cursorLine = figure.querySelector(".cursor");
      this.panel = figure.querySelector(".token-panel");
      this.form = figure.querySelector("form.open-token");
      this.data = JSON.parse(figure.querySelector("script.heatmap-data").textContent);
      this.look = JSON.parse(figure.querySelector("script.heatmap-figure").textContent);
      this.shown = 0;
      this.cursor = this.largest();
      this.opened = null;
      this.draw();
      this.listen();
    }

    get heatmap() { return this.data.heatmaps[this.shown]; }

    draw() {
      this.look.data.forEach((trace, number) => {
        const heatmap = this.data.heatmaps[number];
        const { zero, least } = trace.meta;
        const height = (value) => (value === null ? null : value === 0 ? zero : Math.max(Math.log10(value), least));
        trace.z = heatmap.values.map((row) => row.map(height));
        trace.customdata = heatmap.values.map((row, line) =>
          row.map((_, column) => inert(this.describe(heatmap, line, column))));
      });
      Plotly.newPlot(this.chart, this.look.data, this.look.layout, CONFIG);
    }

    listen() {
      this.chart.on("plotly_click", ({ points: [point] }) => {
        const [line, column] = point.pointIndex ?? point.pointNumber;
        this.moveTo(line, column);
        this.openCell();
      });
      this.chart.addEventListener("keydown", (event) => this.key(event));
      this.chart.addEventListener("focus", () => this.moveTo(...this.cursor));
      this.figure.querySelectorAll(".measures input").forEach((input) => {
        input.addEventListener("change", () => this.show(Number(input.value)));
      });
      const { sequence } = this.form.elements;
      sequence.append(...this.data.sequences.map((one, number) => {
        const option = element("option", "", one.name);
        option.value = number;
        return option;
      }));
      sequence.addEventListener("change", () => this.limit());
      this.limit();
      this.form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.open(Number(sequence.value), Number(this.form.elements.position.value));
      });
    }

    limit() {
      const { sequence, position } = this.form.elements;
      [position.min, position.max] = this.reach(Number(sequence.value));
      const value = Math.min(Math.max(Number(position.value), Number(position.min)), Number(position.max));
      position.value = value;
    }

    // first and last position of a sequence of which something is known
    reach(sequence) {
      const { start, tokens } = this.data.sequences[sequence];
      const columns = this.data.heatmaps.flatMap((one) => one.columns).filter((one) => one[0] === sequence);
      const ends = columns.flatMap((one) => [one[1], one[2] - 1]);
      if (tokens.length) ends.push(start, start + tokens.length - 1);
      return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 0];
    }

    show(number) {
      const [, column] = this.cursor;
      const before = this.heatmap.columns[column];
      this.shown = number;
      const { axis, ticks } = this.look.data[number].meta;
      Plotly.update(
        this.chart,
        { visible: this.look.data.map((_, other) => other === number) },
        { "xaxis.title.text": axis, "xaxis.tickvals": ticks.tickvals, "xaxis.ticktext": ticks.ticktext,
          "xaxis.autorange": true, "yaxis.autorange": true, shapes: [] },
      );
      const same = this.columnOf(before[0], before[1]);
      this.cursor = this.largest();
      if (same >= 0) this.cursor[1] = same;
      if (this.opened) this.open(...this.opened, false);
    }

    largest() {
      let found = [0, 0];
      let most = -1;
      this.heatmap.values.forEach((row, line) => row.forEach((value, column) => {
        if (value !== null && value > most) [most, found] = [value, [line, column]];
      }));
      return found;
    }

    columnOf(sequence, position) {
      return this.heatmap.columns.findIndex(([one, start, stop]) => one === sequence && start <= position && position < stop);
    }

    worstOf(heatmap, line, column) {
      const start = heatmap.columns[column][1];
      return heatmap.worst.length ? start + heatmap.worst[line][column] : start;
    }

    unit(heatmap) { return heatmap.unit === "relative" ? "of its size" : heatmap.unit; }

    describe(heatmap, line, column) {
      const [sequence, start, stop] = heatmap.columns[column];
      const value = heatmap.values[line][column];
      const where = stop - start > 1 ? `positions ${start} to ${stop - 1}` : `position ${start}`;
      const said = value === null ? "not measured" : `${value} ${this.unit(heatmap)}`;
      const most = stop - start > 1 && value ? `, the largest at position ${this.worstOf(heatmap, line, column)}` : "";
      return `${this.data.sequences[sequence].name}, ${where}, into layer ${heatmap.boundaries[line]}: ${said}${most}`;
    }

    moveTo(line, column) {
      this.cursor = [line, column];
      const { boundaries } = this.heatmap;
      const here = boundaries[line];
      const below = line > 0 ? (boundaries[line - 1] + here) / 2 : null;
      const above = line < boundaries.length - 1 ? (here + boundaries[line + 1]) / 2 : null;
      const low = below ?? here - (above === null ? 0.5 : above - here);
      const high = above ?? here + (here - low);
      const box = { type: "rect", x0: column - 0.5, x1: column + 0.5, line: { color: CURSOR, width: 2 } };
      Plotly.relayout(this.chart, {
        shapes: [{ ...box, yref: "paper", y0: 0, y1: 1, line: { color: CURSOR, width: 1 } }, { ...box, y0: low, y1: high }],
      });
      this.cursorLine.textContent = this.describe(this.heatmap, line, column);
    }

    key(event) {
      if (event.target !== this.chart || event.altKey || event.ctrlKey || event.metaKey) return;
      const [line, column] = this.cursor;
      const lines = this.heatmap.boundaries.length - 1;
      const columns = this.heatmap.columns.length - 1;
      const keys = {
        ArrowLeft: [line, column - 1], ArrowRight: [line, column + 1],
        ArrowUp: [line + 1, column], ArrowDown: [line - 1, column],
        PageUp: [line + 10, column], PageDown: [line - 10, column],
        Home: [line, 0], End: [line, columns],
      };
      if (event.key === "Enter" || event.key === " ") this.openCell();
      else if (keys[event.key]) {
        const [wantedLine, wantedColumn] = keys[event.key];
        this.moveTo(Math.min(Math.max(wantedLine, 0), lines), Math.min(Math.max(wantedColumn, 0), columns));
      } else return;
      event.preventDefault();
    }

    openCell() {
      const [line, column] = this.cursor;
      this.open(this.heatmap.columns[column][0], this.worstOf(this.heatmap, line, column));
    }

    open(sequence, position, scroll = true) {
      this.opened = [sequence, position];
      this.form.elements.sequence.value = sequence;
      this.limit();
      const [first, last] = this.reach(sequence);
      const { name } = this.data.sequences[sequence];
      const heading = element("h4", "", `${name}, position ${position}`);
      if (!Number.isInteger(position) || position < first || position > last) {
        this.panel.replaceChildren(heading, element("p", "", `This sequence has positions ${first} to ${last}.`));
        return;
      }
      this.form.elements.position.value = position;
      const column = this.columnOf(sequence, position);
      if (column >= 0 && this.cursor[1] !== column) this.moveTo(this.cursor[0], column);
      const parts = [heading, this.steps(sequence, position, first, last), this.facts(sequence, position, column)];
      parts.push(this.context(sequence, position));
      const small = element("div", "chart small");
      if (column >= 0) parts.push(small);
      this.panel.replaceChildren(...parts);
      if (column >= 0) this.drawColumn(small, column);
      if (scroll) this.panel.scrollIntoView({ block: "nearest" });
    }

    steps(sequence, position, first, last) {
      const made = element("p", "steps");
      for (const [text, to] of [["Previous token", position - 1], ["Next token", position + 1]]) {
        const button = element("button", "", text);
        button.type = "button";
        button.disabled = to < first || to > last;
        button.addEventListener("click", () => {
          this.open(sequence, to);
          // the button that was pressed is gone, and so is the focus
          const again = [...this.panel.querySelectorAll(".steps button")];
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
      const made = element("bdi", "token", shown);
      made.title = `token ${id}, position ${position}`;
      return { id, made };
    }

    facts(sequence, position, column) {
      const { start, first, second } = this.data.sequences[sequence];
      const rows = [];
      const add = (name, ...said) => rows.push(element("div", "", element("dt", "", name), element("dd", "", ...said)));
      const named = (at) => {
        const found = this.token(sequence, at);
        if (!found) return ["not captured"];
        return this.data.text === null ? ["ID ", found.made] : [found.made, ` ID ${found.id}`];
      };
      add("token read", ...named(position));
      add("token predicted", ...named(position + 1));
      const scores = [first, second].map((one) => one[position + 1 - start] ?? null);
      const [a, b] = this.data.labels;
      add(`log-prob, ${a}`, scores[0] === null ? "not captured" : `${digits(scores[0])} nat`);
      add(`log-prob, ${b}`, scores[1] === null ? "not captured" : `${digits(scores[1])} nat`);
      if (!scores.includes(null)) add(`${a} minus ${b}`, `${digits(scores[0] - scores[1])} nat`);
      if (column >= 0) add(this.heatmap.measure, this.layers(column));
      else add(this.heatmap.measure, "no column of the heatmap has this position");
      const width = column >= 0 ? this.heatmap.columns[column][2] - this.heatmap.columns[column][1] : 1;
      if (width > 1) add("column", this.shared(column));
      return element("dl", "facts", ...rows);
    }

    layers(column) {
      const { values, boundaries } = this.heatmap;
      const unit = this.unit(this.heatmap);
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

    shared(column) {
      const [, start, stop] = this.heatmap.columns[column];
      const lines = this.heatmap.values.map((_, line) => line).filter((line) => this.heatmap.values[line][column] !== null);
      const said = `stands for positions ${start} to ${stop - 1}; at each layer it shows the largest of them`;
      if (!lines.length) return said;
      const worst = lines.reduce((best, one) => (this.heatmap.values[one][column] > this.heatmap.values[best][column] ? one : best));
      return `${said}, the worst of all being that of position ${this.worstOf(this.heatmap, worst, column)}`;
    }

    context(sequence, position) {
      const { start, tokens } = this.data.sequences[sequence];
      const made = element("p", "tokens");
      const from = Math.max(position - BEFORE, start);
      const to = Math.min(position + AFTER, start + tokens.length - 1);
      if (from > start) made.append("... ");
      for (let at = from; at <= to; at += 1) {
        const { made: one } = this.token(sequence, at);
        if (at === position) made.append(element("mark", "read", one));
        else if (at === position + 1) made.append(element("mark", "predicted", one));
        else made.append(one);
        made.append(" ");
      }
      if (to < start + tokens.length - 1) made.append("...");
      const said = this.data.text === null
        ? "Marked are the token read and the one predicted from it. These are IDs: `layerbisect report --tokenizer DIR` shows text."
        : "Marked are the token read and the one predicted from it.";
      return element("div", "around", made, element("p", "note", said));
    }

    drawColumn(where, column) {
      const { values, boundaries, measure, unit } = this.heatmap;
      where.setAttribute("role", "img");
      where.setAttribute("aria-label", `${measure} by layer boundary for this column`);
      const { font } = this.look.layout;
      Plotly.newPlot(where, [{
        type: "scatter", mode: "lines+markers", x: boundaries, y: values.map((row) => row[column]),
        line: { color: "#0072B2" }, hovertemplate: "into layer %{x}: %{y:.3g}<extra></extra>",
      }], {
        font, height: 220, margin: { l: 64, r: 16, t: 8, b: 44 },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        xaxis: { title: { text: "layer boundary" }, zeroline: false },
        yaxis: { title: { text: `${measure}, ${unit}` }, zeroline: false, rangemode: "tozero" },
      }, CONFIG);
    }
  }

  document.querySelectorAll("figure.heatmap").forEach((figure) => blocks.push(new HeatmapBlock(figure)));

  // opens a token in the heatmap of the same result as `near`, where there are several
  window.layerbisectOpenToken = (sequence, position, near = null) => {
    const having = blocks.filter(({ data }) => data.sequences.some((one) => one.name === sequence));
    let block = having[0];
    for (let place = near; place; place = place.parentElement) {
      const found = having.find((one) => place.contains(one.figure));
      if (found) {
        block = found;
        break;
      }
    }
    if (!block) return false;
    block.open(block.data.sequences.findIndex((one) => one.name === sequence), position);
    block.panel.focus({ preventScroll: true });
    block.panel.scrollIntoView({ block: "center" });
    return true;
  };
})();
