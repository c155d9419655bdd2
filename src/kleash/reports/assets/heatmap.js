"use strict";
// The token view: one sequence at a time; hovering, tapping or the arrow keys show both models' probabilities of a token.
(() => {
  const heat = document.getElementById("heat");
  if (!heat) return;
  const thresholds = heat.dataset.thresholds.split(" ").map(Number);
  const sources = Array.from(heat.querySelectorAll("script.heat-data"));
  const [choice, previous, next, largest, box, panel, prompt, announcement] =
    ["choice", "previous", "next", "largest", "tokens", "panel", "prompt", "announcement"].map((name) => document.getElementById("heat-" + name));
  const NON_FINITE = { Infinity: Infinity, "-Infinity": -Infinity, NaN: NaN };
  let sequence = null;
  let current = 0;

  const number = (value) => (typeof value === "string" ? NON_FINITE[value] : value);
  const plain = (value) => {
    const x = number(value);
    if (Number.isNaN(x)) return "NaN";
    if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
    return digits(x);
  };
  // Three significant digits, as in the tables; very small or large numbers as 1.23 × 10⁻⁷.
  const digits = (x) => {
    if (x === 0) return "0";
    const [mantissa, exponent] = x.toExponential(2).split("e");
    const power = Number(exponent);
    if (power >= -4 && power < 6) return x.toFixed(Math.max(0, 2 - power)).replace("-", "−");
    const raised = String(power).replace(/[-0-9]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
    return `${mantissa.replace("-", "−")} × 10${raised}`;
  };
  const percent = (value) => {
    const x = 100 * number(value);
    if (!Number.isFinite(x)) return plain(x);
    return digits(x) + "\u202f%";
  };
  const add = (parent, tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  };

  const step = (kl) => thresholds.filter((threshold) => number(kl) >= threshold).length;

  // Spaces at a token's ends are shown as spaces; a line break is shown and breaks the line.
  const inLine = (text) => {
    if (/^[␣]+$/.test(text)) return text;
    return text.replace(/^␣+|␣+$/g, (spaces) => " ".repeat(spaces.length)).replace(/⏎/g, "⏎\n");
  };

  const show = (index, position) => {
    current = index;
    sequence = JSON.parse(sources[index].textContent);
    choice.value = String(index);
    previous.disabled = index === 0;
    next.disabled = index === sources.length - 1;
    prompt.textContent = sequence.prompt;
    const fragment = document.createDocumentFragment();
    sequence.text.forEach((text, at) => {
      const unseen = /^[␣⏎␍⇥∅]+$/.test(text) ? " unseen" : "";
      const unknown = Number.isNaN(number(sequence.kl[at])) ? " unknown" : "";
      const token = add(fragment, "span", inLine(text), `token h${step(sequence.kl[at])}${unseen}${unknown}`);
      token.setAttribute("role", "option");
      token.setAttribute("aria-selected", "false");
      token.setAttribute("aria-label", `${text}, ${plain(sequence.kl[at])} nats`);
      token.tabIndex = -1;
      token.dir = "auto";
    });
    const more = sequence.tokens - sequence.text.length;
    if (more) add(fragment, "span", ` … ${more} more`, "unit");
    box.replaceChildren(fragment);
    const place = position === undefined ? peak() : sequence.position.indexOf(position);
    select(place < 0 ? 0 : place);
  };

  const tokens = () => box.querySelectorAll(".token");
  const peak = () => sequence.kl.reduce((best, kl, at) => (number(kl) > number(sequence.kl[best]) ? at : best), 0);
  const selected = () => Array.prototype.indexOf.call(tokens(), box.querySelector('[aria-selected="true"]'));

  const select = (at, focus = false) => {
    const before = box.querySelector('[aria-selected="true"]');
    const token = tokens()[at];
    if (!token) return;
    if (before) { before.setAttribute("aria-selected", "false"); before.tabIndex = -1; }
    token.setAttribute("aria-selected", "true");
    token.tabIndex = 0;
    if (focus) token.focus({ preventScroll: false });
    describe(at);
  };

  const describe = (at) => {
    const of = (name) => sequence[name][at];
    const fragment = document.createDocumentFragment();
    const unfold = add(fragment, "button", panel.dataset.open ? "Fewer numbers" : "All numbers", "unfold");
    unfold.type = "button";
    add(add(fragment, "h4"), "bdi", of("text"));
    add(fragment, "p", `position ${of("position")}, token id ${of("token_id")}`, "where");
    const table = add(fragment, "table");
    const head = add(add(table, "thead"), "tr");
    add(head, "td");
    for (const name of ["policy", "reference"]) add(head, "th", name, "n").scope = "col";
    const body = add(table, "tbody");
    const row = (name, values, className) => {
      const line = add(body, "tr", undefined, className);
      add(line, "th", name).scope = "row";
      values.forEach((value) => { const cell = add(line, "td", value, "n"); if (values.length === 1) cell.colSpan = 2; });
    };
    row("Probability", [percent(of("p")), percent(of("q"))], "strong");
    row("Entropy, nats", [plain(of("entropy_p")), plain(of("entropy_q"))]);
    row("Reference's rank, from 0", [String(of("rank"))]);
    row(heat.dataset.kl, [plain(of("kl"))], "strong");
    row(heat.dataset.reverse, [plain(of("reverse"))]);
    row("Jensen–Shannon", [plain(of("jensen_shannon"))]);
    row("Total variation", [percent(of("total_variation"))]);
    const likeliest = add(fragment, "div", undefined, "alternatives");
    if (of("alternatives").every((flat) => flat.length === 0)) {
      add(likeliest, "p", "The most likely tokens are stored only for the sequences with the largest KL.", "where");
    } else of("alternatives").forEach((flat, side) => {
      const part = add(likeliest, "div");
      add(part, "h5", `${side === 0 ? "Policy" : "Reference"}'s top ${flat.length / 2}`);
      const list = add(part, "ol");
      for (let i = 0; i < flat.length; i += 2) {
        const text = sequence.texts[flat[i]];
        const line = add(list, "li", undefined, text === of("text") ? "observed" : "");
        line.style.setProperty("--share", `${100 * number(flat[i + 1])}%`);
        add(line, "bdi", text);
        add(line, "span", percent(flat[i + 1]));
      }
    });
    panel.replaceChildren(fragment);
    announcement.textContent = `${of("text")}: policy ${percent(of("p"))}, reference ${percent(of("q"))}, ` +
      `rank ${of("rank")}, KL ${plain(of("kl"))} nats`;
  };

  // The nearest token in the next line (sign 1) or the previous line (sign -1).
  const otherLine = (at, sign) => {
    const all = tokens();
    const from = all[at].getClientRects()[0];
    let best = at, bestLine = null, bestDistance = Infinity;
    for (let i = at + sign; i >= 0 && i < all.length; i += sign) {
      const to = all[i].getClientRects()[0];
      if (!to || sign * (to.top - from.top) < from.height / 2) continue;
      if (bestLine === null) bestLine = to.top;
      if (Math.abs(to.top - bestLine) > from.height / 2) break;
      const distance = Math.abs(to.left - from.left);
      if (distance < bestDistance) { best = i; bestDistance = distance; }
    }
    return best;
  };

  const turn = (by) => {
    const to = current + by;
    if (to < 0 || to >= sources.length) return false;
    show(to);
    return true;
  };

  box.addEventListener("keydown", (event) => {
    const at = selected();
    const last = sequence.text.length - 1;
    const goal = {
      ArrowRight: () => Math.min(at + 1, last), ArrowLeft: () => Math.max(at - 1, 0), Home: () => 0, End: () => last,
      ArrowDown: () => otherLine(at, 1), ArrowUp: () => otherLine(at, -1),
      PageDown: () => (turn(1) ? selected() : at), PageUp: () => (turn(-1) ? selected() : at),
    }[event.key];
    if (!goal || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    select(goal(), true);
  });
  const indexOf = (event) => Array.prototype.indexOf.call(tokens(), event.target.closest(".token"));
  for (const name of ["pointerover", "focusin", "click"]) {
    box.addEventListener(name, (event) => {
      const at = indexOf(event);
      if (at >= 0 && at !== selected()) select(at);
    });
  }
  // On a narrow screen the panel is collapsed until it is opened.
  panel.addEventListener("click", (event) => {
    if (!event.target.closest(".unfold")) return;
    if (panel.dataset.open) delete panel.dataset.open; else panel.dataset.open = "yes";
    describe(selected());
  });
  choice.addEventListener("change", () => show(Number(choice.value)));
  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  largest.addEventListener("click", () => select(peak(), true));
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.show");
    if (!button) return;
    const { prompt: promptId, sample, position } = button.dataset;
    const option = sources.findIndex((source) => {
      const of = JSON.parse(source.textContent);
      return of.prompt_id === Number(promptId) && of.sample_id === Number(sample) && of.position.includes(Number(position));
    });
    show(option, Number(position));
    tokens()[selected()].focus({ preventScroll: true });
    box.scrollIntoView({ block: "center" });
  });
  show(0);
})();
