"use strict";
(() => {
  const draw = (figure) => {
    const chart = figure.querySelector(".chart");
    const data = JSON.parse(figure.querySelector("script.figure").textContent);
    return Plotly.newPlot(chart, data.data, data.layout, { displayModeBar: false, responsive: true });
  };
  document.querySelectorAll("figure.plot").forEach(draw);

  const copy = async (button) => {
    const text = button.dataset.copy;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // a browser that refuses the clipboard to a page from disk: mark the text to be copied by hand
      window.getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      button.textContent = "Press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.copy, button.open");
    if (!button) return;
    if (button.matches(".copy")) {
      copy(button);
      return;
    }
    const at = button.dataset.opens.lastIndexOf(":");
    const [sequence, position] = [button.dataset.opens.slice(0, at), button.dataset.opens.slice(at + 1)];
    layerbisectOpenToken(sequence, Number(position), button);
  });

  // what is folded away is printed, too
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
    document.querySelectorAll(".js-plotly-plot").forEach((one) => Plotly.Plots.resize(one));
  });
})();
