// What the pages do with a script: what is live, keys, times in the reader's zone, copying. All of it works without.
"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Times: the exact one, in the reader's zone and in UTC, is shown on hover; "3 min ago" goes on counting.
  const span = (seconds) => {
    if (seconds < 120) return `${Math.round(seconds)} s`;
    if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
    return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
  };
  const times = () => {
    for (const each of all("time")) {
      const at = new Date(each.dateTime);
      const past = (Date.now() - at) / 1000;
      each.textContent = past < 0 ? `in ${span(-past)}` : `${span(past)} ago`;
      if (!each.dataset.zoned) {
        each.dataset.zoned = "1";
        each.title = `${at.toLocaleString()} here · ${each.title}`;
      }
    }
  };
  times();
  setInterval(times, 10000);

  // Live: the server sends whole parts of the page.
  const from = document.body.dataset.liveFrom;
  const mark = document.querySelector("[data-live-mark]");
  if (from && mark && window.EventSource) {
    const say = (isLive, text) => {
      mark.hidden = false;
      mark.classList.toggle("off", !isLive);
      mark.textContent = isLive ? "live" : "not live";
      mark.title = text;
    };
    let parts = {};
    const renew = () => {
      for (const part of all("[data-live]")) {
        const text = parts[part.dataset.live];
        // Nothing changes under somebody's fingers.
        const isInUse = part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, button");
        if (text === undefined || isInUse || part.dataset.last === text) continue;
        const focus = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        part.dataset.last = text;
        part.innerHTML = text;
        if (focus) all("a", part).find((each) => each.getAttribute("href") === focus)?.focus();
      }
      times();
    };
    // What was in use is renewed when it is not any more.
    document.addEventListener("focusout", () => setTimeout(renew));
    const source = new EventSource(from);
    source.onopen = () => say(true, "this page is kept up to date");
    source.onerror = () => say(false, "the console does not answer; what is shown is what was known last");
    source.onmessage = (event) => {
      const found = JSON.parse(event.data);
      if (found.problem) return say(false, found.problem);
      say(true, "this page is kept up to date");
      parts = found.parts;
      renew();
    };
  }

  // Copying.
  for (const button of all("[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.dataset.copy);
        const before = button.textContent;
        button.textContent = "copied";
        setTimeout(() => { button.textContent = before; }, 1500);
      } catch { /* the text stands beside the button */ }
    });
  }

  // Keys.
  const keys = document.getElementById("keys");
  const hint = document.querySelector(".keys-hint");
  if (hint) hint.hidden = false;
  const rows = () => all("[data-row]").filter((row) => row.offsetParent);
  const move = (step) => {
    const found = rows();
    const at = found.findIndex((row) => row.contains(document.activeElement));
    const next = found[at < 0 ? (step > 0 ? 0 : found.length - 1) : Math.min(Math.max(at + step, 0), found.length - 1)];
    (next?.querySelector("a") ?? next?.querySelector("button, input") ?? next)?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  let before = "";
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || keys?.open) return;
    if (event.target.matches("input:not([type=checkbox]), select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const page = { n: ".brand", m: 'nav a[href$="/messages"]', a: 'nav a[href$="/actions"]', p: 'nav a[href$="/plans"]' };
    const press = (selector) => document.querySelector(selector)?.click();
    const done = {
      j: () => move(1), k: () => move(-1),
      "/": () => document.querySelector("input[type=search]")?.focus(),
      "?": () => keys?.showModal(),
      e: () => press("[data-key=e]"), r: () => press("[data-key=r]"),
      x: () => document.activeElement?.closest("[data-row]")?.querySelector("input[type=checkbox]")?.click(),
    };
    if (before === "g" && page[event.key]) press(page[event.key]);
    else if (done[event.key]) { event.preventDefault(); done[event.key](); }
    before = event.key;
  });

  // One box selects all rows of the page.
  for (const box of all("[data-selects-all]")) {
    box.hidden = false;
    box.addEventListener("change", () => { for (const each of all("input[name=id]")) each.checked = box.checked; });
  }
})();
