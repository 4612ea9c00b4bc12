"use strict";
(() => {
  const CONFIG = { displayModeBar: false, responsive: true };
  const CURSOR = "#D55E00";
  const blocks = [];

  class HeatmapBlock {
    constructor(figure) {
      this.figure = figure;
      this.chart = figure.querySelector(".chart");
      this.cursorLine = figure.querySelector(".cursor");
      this.form = figure.querySelector("form.open-token");
      this.data = JSON.parse(figure.querySelector("script.heatmap-data").textContent);
      this.look = JSON.parse(figure.querySelector("script.heatmap-figure").textContent);
      this.panel = new TokenPanel(figure.querySelector(".token-panel"), this.data, this.look.layout);
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
          row.map((_, column) => HeatmapText.inert(this.describe(heatmap, line, column))));
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
        const option = HeatmapText.element("option", "", one.name);
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

    describe(heatmap, line, column) {
      const [sequence, start, stop] = heatmap.columns[column];
      const value = heatmap.values[line][column];
      const where = stop - start > 1 ? `positions ${start} to ${stop - 1}` : `position ${start}`;
      const said = value === null ? "not measured" : `${value} ${HeatmapText.unit(heatmap)}`;
      const most = stop - start > 1 && value ? `, the largest at position ${HeatmapText.worst(heatmap, line, column)}` : "";
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
      this.open(this.heatmap.columns[column][0], HeatmapText.worst(this.heatmap, line, column));
    }

    open(sequence, position, scroll = true) {
      this.opened = [sequence, position];
      this.form.elements.sequence.value = sequence;
      this.limit();
      const [first, last] = this.reach(sequence);
      if (!Number.isInteger(position) || position < first || position > last) {
        const { name } = this.data.sequences[sequence];
        this.panel.say(`${name}, position ${position}`, `This sequence has positions ${first} to ${last}.`);
        return;
      }
      this.form.elements.position.value = position;
      const column = this.columnOf(sequence, position);
      if (column >= 0) this.moveTo(this.cursor[0], column);
      this.panel.show(this.heatmap, sequence, position, column, [first, last], (to) => this.open(sequence, to));
      if (scroll) this.panel.section.scrollIntoView({ block: "nearest" });
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
    block.panel.section.focus({ preventScroll: true });
    block.panel.section.scrollIntoView({ block: "center" });
    return true;
  };
})();
