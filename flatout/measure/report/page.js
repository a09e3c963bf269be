// The page's own script: shows the charts, and moves a cursor over all of them.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector, inside = document) => [...inside.querySelectorAll(selector)];
let axis = "step";
let plots = [];
let bokeh = null;

async function show() {
  const roots = {};
  plots = data.charts.map((chart) => {
    const figure = document.querySelector(`[data-chart="${chart.key}"]`);
    const holder = figure.querySelector(".plot");
    roots[chart.root] = document.createElement("div");
    holder.prepend(roots[chart.root]);
    return { ...chart, figure, holder };
  });
  await Bokeh.embed.embed_items({ d: data.document }, [
    { docid: "d", root_ids: Object.keys(roots), roots, use_for_title: false },
  ]);
  bokeh = Bokeh.documents[Bokeh.documents.length - 1];
  for (const plot of plots) {
    plot.model = bokeh.get_model_by_id(plot.root);
    plot.view = Bokeh.index.get(plot.model);
    plot.model.y_range.default_span = 2 * largest(plot.model) || 2;  // from 0, if all are equal
    listen(plot);
    if (matchMedia("(pointer: coarse)").matches) plot.model.toolbar.active_drag = null;
  }
  for (const radio of find('input[name="axis"]')) {
    radio.disabled = data.bounds[radio.value] === null;
    radio.addEventListener("change", () => setAxis(radio.value));
  }
  find(".legend button").forEach((button) => button.addEventListener("click", () => toggle(button)));
  document.getElementById("reset").addEventListener("click", wholeRun);
  document.getElementById("theme").addEventListener("click", switchTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  setAxis(axis);
  paint();
  document.documentElement.dataset.ready = "yes";
}

function largest(model) {
  const values = model.renderers.flatMap(({ data_source }) => [...column(data_source, "value")]);
  return values.reduce((most, value) => Math.max(most, Math.abs(value) || 0), 0);
}

function range() {
  return plots[0].model.x_range;
}

function setAxis(name) {
  axis = name;
  for (const { model } of plots) {
    for (const one of model.below) one.visible = one.name === name;
    for (const renderer of model.renderers) renderer.glyph.x = { field: name };
  }
  wholeRun();
  moveCursor(null);
}

function wholeRun() {
  const [low, high] = data.bounds[axis] ?? [0, 1];
  const margin = (high - low || 1) * 0.01;
  zoomTo(low - margin, high + margin);
}

function zoomTo(start, end) {
  if (plots.length) range().setv({ start, end });
}

// Colours come from page.css, so that both themes have one place.
function paint() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const { model } of plots) {
    for (const one of [...model.below, ...model.left]) one.major_label_text_color = color("quiet");
    for (const grid of model.center) grid.grid_line_color = grid.dimension === 1 ? color("line") : null;
    for (const renderer of model.renderers) {
      const value = { value: color(renderer.glyph.tags[0]) };
      if (renderer.glyph.type === "Line") renderer.glyph.line_color = value;
      else renderer.glyph.fill_color = value;
    }
  }
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  paint();
}

function toggle(button) {
  const visible = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(visible));
  for (const { model } of plots) {
    for (const renderer of model.renderers) {
      if (renderer.name === button.dataset.line) renderer.visible = visible;
    }
  }
}

function listen(plot) {
  plot.holder.addEventListener("pointermove", (event) => {
    const { left, width } = frame(plot);
    const at = (event.clientX - plot.holder.getBoundingClientRect().left - left) / width;
    const { start, end } = range();
    moveCursor(at < 0 || at > 1 ? null : start + at * (end - start));
  });
  plot.holder.addEventListener("pointerleave", () => moveCursor(null));
  plot.holder.addEventListener("dblclick", wholeRun);
}

function frame(plot) {
  const box = plot.view.frame.bbox;
  return { left: box.left, width: box.width, top: box.top, height: box.height };
}

// One cursor over all charts; the legends show the values there.
function moveCursor(at) {
  if (!plots.length) return;
  const { start, end } = range();
  for (const plot of plots) {
    const line = plot.holder.querySelector(".cursor");
    line.hidden = at === null;
    if (at !== null) {
      const { left, width, top, height } = frame(plot);
      line.style.left = `${left + ((at - start) / (end - start)) * width}px`;
      line.style.top = `${top}px`;
      line.style.height = `${height}px`;
    }
    for (const button of find(".legend button", plot.figure)) {
      button.querySelector("output").textContent = at === null ? "" : valueAt(button.dataset.line, at);
    }
  }
}

function column(source, name) {
  const values = source.data instanceof Map ? source.data.get(name) : source.data[name];
  return values ?? [];
}

function valueAt(key, at) {
  const source = bokeh.get_model_by_name(`${key}|curve`);
  const positions = column(source, axis);
  const reach = (range().end - range().start) / 100;
  const nearest = indexNear(positions, at);
  // false for positions that are not known
  const isInside = at >= positions[0] - reach && at <= positions[positions.length - 1] + reach;
  if (nearest === null || !isInside) return "";
  const value = column(source, "value")[nearest];
  return Number.isFinite(value) ? formatted(value) : "";
}

function indexNear(positions, at) {
  if (!positions.length) return null;
  let low = 0;
  let high = positions.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (positions[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - positions[low - 1] < positions[low] - at ? low - 1 : low;
}

function formatted(value) {
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return value.toPrecision(4);
}

show();
