// Redraws the report's panels for the x axis and the runs that are chosen. Without it the static
// pictures stay. Everything drawn comes from the page's own data, as data.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const panels = [...document.querySelectorAll(".panel")];
const dark = matchMedia("(prefers-color-scheme: dark)");
const state = { axis: "step", hidden: new Set(), version: 0 };

function specification(index) {
  const { spec, series } = data.panels[index];
  return {
    ...spec,
    width: "container",
    data: { values: series.filter((one) => !state.hidden.has(one.run)) },
    encoding: data.encodings[state.axis],
  };
}

async function draw(panel) {
  const version = String(state.version);
  if (panel.dataset.drawn === version) return;
  panel.dataset.drawn = version;
  const next = document.createElement("div");
  next.className = "picture coming"; // laid out, but not seen before it is drawn
  panel.querySelector(".picture").after(next);
  await vegaEmbed(next, specification(Number(panel.dataset.index)), {
    actions: false,
    ast: true, // expressions are interpreted: the page's policy forbids eval
    config: data.config,
    mode: "vega-lite",
    renderer: "svg",
    tooltip: { theme: dark.matches ? "dark" : "light" },
  });
  if (panel.dataset.drawn !== version) return next.remove(); // chosen anew meanwhile
  panel.querySelectorAll(".picture:not(.coming)").forEach((old) => old.remove());
  next.classList.remove("coming");
}

async function redraw() {
  const version = ++state.version;
  const inView = (panel) => {
    const { top, bottom } = panel.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  };
  const [seen, others] = [panels.filter(inView), panels.filter((panel) => !inView(panel))];
  for (const panel of [...seen, ...others]) {
    if (state.version !== version) return; // chosen anew meanwhile
    await draw(panel);
  }
  document.body.dataset.drawn = String(version);
}

for (const radio of document.querySelectorAll("input[name=axis]")) {
  radio.addEventListener("change", () => {
    state.axis = radio.value;
    redraw();
  });
}

for (const button of document.querySelectorAll("button[data-run]")) {
  button.addEventListener("click", () => {
    const run = data.runs[Number(button.dataset.run)];
    const shown = state.hidden.delete(run);
    if (!shown) state.hidden.add(run);
    button.setAttribute("aria-pressed", String(shown));
    redraw();
  });
}

document.body.classList.add("scripted");
const coming = new IntersectionObserver(
  (entries) => entries.filter((e) => e.isIntersecting).forEach((e) => draw(e.target)),
  { rootMargin: "400px" },
);
panels.forEach((panel) => coming.observe(panel));
