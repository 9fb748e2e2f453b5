// The page's own code: theme, charts, sorting, copying, and Perfetto. Nothing is fetched; only a click opens another site.
const root = document.documentElement;
const say = (text, forMs = 2500) => {
  const place = document.getElementById("said");
  place.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { place.textContent = ""; }, forMs);
};

// Theme: what the system prefers, until the button is pressed.
const preferred = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
try { chosen = localStorage.getItem("flopwise-theme"); } catch { /* a page from a file may not remember */ }
const theme = () => (chosen === "dark" || chosen === "light" ? chosen : preferred.matches ? "dark" : "light");
const paint = () => {
  root.dataset.theme = theme();
  document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark";
};
document.getElementById("theme").addEventListener("click", () => {
  chosen = theme() === "dark" ? "light" : "dark";
  try { localStorage.setItem("flopwise-theme", chosen); } catch { /* as above */ }
  paint();
});
preferred.addEventListener("change", paint);

// Charts: drawn when they come into sight. Their words and lines have the page's own colours, so that they change with the
// theme and on paper without being drawn again: a browser prints at once.
const specs = JSON.parse(document.getElementById("specs").textContent);
const look = () => {
  const ink = "var(--ink)", line = "var(--grid)", soft = "var(--soft)";
  return {
    background: "transparent", view: { stroke: line },
    font: "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    axis: { labelFontSize: 12, titleFontSize: 12, labelColor: ink, titleColor: soft, gridColor: line, domainColor: soft, tickColor: soft, titleFontWeight: "normal" },
    legend: { labelFontSize: 12, labelColor: ink, titleColor: soft }, title: { color: ink, subtitleColor: soft },
    header: { labelFontSize: 12, titleFontSize: 12, labelColor: ink, titleColor: soft },
  };
};
// On a narrow screen a chart of one view is as wide as the screen, its legend below it; charts side by side stand below each
// other; others are scrolled in their box.
const AXIS = 140; // pixels of the room that an axis with its words takes
const fitted = (spec, room) => {
  if (room >= 600) return spec;
  const legend = { ...spec.config?.legend, orient: "bottom", columns: 1 };
  if (spec.facet?.field && typeof spec.spec.width === "number") {
    const one = { ...spec.spec, width: Math.max(room - AXIS, AXIS) };
    return { ...spec, columns: 1, spec: one, padding: 5, config: { ...spec.config, legend } };
  }
  if (typeof spec.width !== "number") return spec;
  return { ...spec, width: room, autosize: { type: "fit-x", contains: "padding" }, padding: 5, config: { ...spec.config, legend } };
};
const embed = async (holder) => {
  const name = holder.dataset.chart;
  if (holder.dataset.drawn) return;
  holder.dataset.drawn = "yes";
  try {
    const made = await window.vegaEmbed(holder, fitted(specs[name], holder.clientWidth), {
      ast: true, actions: false, renderer: "svg", defaultStyle: false, config: look(),
      tooltip: { disableDefaultStyle: true, sanitize: (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;") },
    });
    list(name, made.view);
    holder.dataset.ready = "yes";
  } catch (error) {
    holder.textContent = "This chart could not be drawn; its numbers are in the tables.";
    console.error(error);
  }
};
// A part to go into, from a list: what a click does, for the keyboard. Escape comes out.
const list = (name, view) => {
  const box = document.querySelector(`[data-into="${name}"]`);
  if (!box) return;
  box.parentElement.hidden = false;
  const go = () => {
    const part = box.selectedOptions[0];
    const values = part?.dataset.from === undefined ? [] : [Number(part.dataset.from), Number(part.dataset.to)];
    view.data("into_store", values.length ? [{ unit: "", fields: view.signal("into_tuple_fields"), values }] : []).run();
  };
  box.onchange = go;
  box.onkeydown = (event) => { if (event.key === "Escape") { box.selectedIndex = 0; go(); } };
  view.addSignalListener("into", (_, chosen) => {
    const at = [...box.options].findIndex((one) => Number(one.dataset.from) === chosen.x0?.[0] && Number(one.dataset.to) === chosen.x1?.[0]);
    box.selectedIndex = chosen.x0 === undefined ? 0 : at;
  });
  if (box.selectedIndex > 0) go();
};
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) embed(entry.target);
}, { rootMargin: "300px" });
const holders = [...document.querySelectorAll("[data-chart]")];
paint();
holders.forEach((holder) => sight.observe(holder));
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details:not([open])")) {
    one.open = true;
    addEventListener("afterprint", () => { one.open = false; }, { once: true });
  }
  holders.forEach(embed);
});
window.flopwise = { drawAll: () => Promise.all(holders.map(embed)) };

// Tables: a header is a button that sorts; the raw values sort, not the words. Whichever way, what is blank comes last, and
// after it the row that adds up the others.
const value = (cell) => cell.dataset.v ?? cell.textContent;
const rank = (row, text) => (row.classList.contains("total") ? 2 : text === "" ? 1 : 0);
const compare = (a, b) => {
  const x = Number(a), y = Number(b);
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return a.localeCompare(b);
};
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const header = button.parentElement, table = header.closest("table"), column = header.cellIndex;
    const numbers = header.classList.contains("right");
    const now = header.getAttribute("aria-sort");
    const next = now === "none" ? (numbers ? "descending" : "ascending") : now === "descending" ? "ascending" : "descending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const x = value(a.cells[column]), y = value(b.cells[column]);
      return rank(a, x) - rank(b, y) || sign * compare(x, y);
    });
    table.tBodies[0].append(...rows);
    say(`sorted by ${button.textContent}, ${next}`);
  });
}
const quoted = (text) => {
  const safe = /^[=+@]|^-(?![\d.])/.test(text) ? `'${text}` : text; // a name must not become a formula
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
const csv = (table) => {
  const keys = [...table.tHead.rows[0].cells].map((cell) => quoted(cell.dataset.key));
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => quoted(value(cell))).join(","));
  return [keys.join(","), ...rows].join("\r\n") + "\r\n";
};
const copy = async (text) => {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed here: the older way */ }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
};
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const text = csv(document.getElementById(button.dataset.copies));
    window.flopwise.copied = text;
    say((await copy(text)) ? "copied as CSV" : "the browser does not let this page copy");
    button.focus();
  });
}

// A finding's link may lead into something folded.
const reveal = () => {
  const there = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!there) return;
  for (let fold = there.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  there.scrollIntoView();
};
addEventListener("hashchange", reveal);
reveal();

// Perfetto: the trace is too large to be in this page, so its file is asked for, and handed to Perfetto's own page,
// which reads it inside the browser.
const picker = document.getElementById("trace-file");
const SITE = "https://ui.perfetto.dev", PATIENCE_MS = 60000, READABLE_MS = 15000;
const NETWORK = "Perfetto needs a network: its page is ui.perfetto.dev";
document.getElementById("perfetto-open")?.addEventListener("click", () => {
  if (!navigator.onLine) { say(NETWORK, READABLE_MS); return; }
  picker.value = ""; // the same file chosen again is a change, too
  picker.click();
});
picker?.addEventListener("change", async () => {
  const file = picker.files[0];
  if (!file) return;
  if (!navigator.onLine) { say(NETWORK, READABLE_MS); return; }
  const other = window.open(SITE);
  if (!other) { say("the browser blocked the new tab", READABLE_MS); return; }
  say("waiting for Perfetto…", PATIENCE_MS);
  const buffer = await file.arrayBuffer();
  const heard = (event) => {
    if (event.origin !== SITE || event.source !== other || event.data !== "PONG") return;
    stop("handed to Perfetto");
    other.postMessage({ perfetto: { buffer, title: file.name } }, SITE);
  };
  const stop = (text) => {
    clearInterval(ask);
    clearTimeout(late);
    removeEventListener("message", heard);
    say(text, READABLE_MS);
  };
  const ask = setInterval(() => (other.closed ? stop("Perfetto's tab was closed") : other.postMessage("PING", SITE)), 100);
  const late = setTimeout(() => stop("no answer from Perfetto: it needs a network"), PATIENCE_MS);
  addEventListener("message", heard);
});
