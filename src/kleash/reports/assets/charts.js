"use strict";
// Draws the charts one at a time, so that the page stays responsive, and again when the theme changes.
(() => {
  const themed = (part, style) => {
    if (typeof part === "string") return part.replace(/^var\((--[\w-]+)\)$/, (_, name) => style.getPropertyValue(name).trim());
    if (Array.isArray(part)) return part.map((inner) => themed(inner, style));
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([key, inner]) => [key, themed(inner, style)]));
  };

  const places = Array.from(document.querySelectorAll("[data-figure]"));
  const config = { responsive: true, displayModeBar: false, showTips: false, doubleClick: false };

  const draw = (place, width) => {
    const figure = JSON.parse(document.getElementById(place.dataset.figure).textContent);
    const { data, layout } = themed(figure, getComputedStyle(document.documentElement));
    const sized = width ? { ...layout, width, autosize: false } : { ...layout, autosize: true };
    return Plotly.react(place, data, sized, config).then(() => { place.dataset.drawn = "yes"; });
  };

  const drawAll = async () => {
    for (const place of places) {
      await draw(place);
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.documentElement.dataset.charts = "drawn";
  };

  // A printed page has its own width and no dark mode; all charts are drawn at once.
  const PRINTED = 690;
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    for (const place of places) draw(place, PRINTED);
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    drawAll();
  });

  // A chart in a closed <details> has no width; it is resized when it opens.
  document.addEventListener("toggle", (event) => {
    if (event.target.open) event.target.querySelectorAll("[data-drawn]").forEach((place) => Plotly.Plots.resize(place));
  }, true);

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  requestAnimationFrame(() => setTimeout(drawAll));
})();
