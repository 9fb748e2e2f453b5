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
    legend: { labelFontSize: 12, labelColor: ink, titleColor: soft }, title: { color: ink, subtitleColor: soft }, text: { fill: soft },
    header: { labelFontSize: 12, titleFontSize: 12, labelColor: ink, titleColor: soft },
  };
};
// A chart is as wide as its place: of one view by itself, views below each other by what is left once they are drawn. On a
// narrow screen the legend is below, a title is left to the page, and charts side by side stand below each other; what is
// still wider scrolls in its box.
const AXIS = 140, NARROW = 560; // pixels: an axis with its words; a narrow place
const small = (spec) => JSON.parse(JSON.stringify(spec), (key, value) => (key === "axis" && value?.labelLimit !== undefined ? { ...value, labelFontSize: 10, labelPadding: 4 } : value));
const fitted = (spec, room) => {
  const legend = { ...spec.config?.legend, orient: "bottom", columns: 1 };
  const whole = { ...spec, padding: { left: 5, top: 5, right: 12, bottom: 5 } };
  const all = room < NARROW ? small({ ...whole, title: undefined, config: { ...spec.config, legend } }) : whole;
  if (typeof spec.width === "number") return { ...all, width: room, autosize: { type: "fit-x", contains: "padding" } };
  if (room >= NARROW || !spec.facet?.field || typeof spec.spec.width !== "number") return all;
  return { ...all, columns: 1, spec: { ...spec.spec, width: Math.max(room - AXIS, AXIS) } };
};
const widened = (spec, by) => ({ ...spec, vconcat: spec.vconcat.map((one) => ({ ...one, width: Math.max(one.width + by, AXIS) })) });
// Vega is packed in the page; the policy lets it run by the hash of what comes out.
const unpacked = async () => {
  const packed = atob(document.getElementById("vega").textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const script = document.createElement("script");
  script.type = "module";
  script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const done = new Promise((resolve) => addEventListener("vega", resolve, { once: true })); // an inline script has no `load`
  document.head.append(script);
  await done;
};
let vega;
const embed = async (holder) => {
  const name = holder.dataset.chart;
  if (holder.dataset.drawn) return;
  holder.dataset.drawn = "yes";
  try {
    await (vega ??= unpacked());
    const room = holder.clientWidth, draw = (spec) => window.vegaEmbed(holder, spec, {
      ast: true, actions: false, renderer: "svg", defaultStyle: false, config: look(),
      tooltip: { disableDefaultStyle: true, sanitize: (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;") },
    });
    let made = await draw(fitted(specs[name], room));
    if (specs[name].vconcat) {
      const wide = holder.querySelector("svg").viewBox.baseVal.width;
      made = await draw(widened(fitted(specs[name], room), room - wide));
    }
    list(name, made.view);
    holder.dataset.ready = "yes";
  } catch (error) {
    holder.textContent = "This chart could not be drawn; its numbers are in the tables.";
    console.error(error);
  }
};
// A chart as a picture: by itself it has no page that gives it colours, so they are written into it.
const picture = async (holder) => {
  await embed(holder);
  const svg = holder.querySelector("svg"), { width, height } = svg.viewBox.baseVal, colours = getComputedStyle(root);
  const text = new XMLSerializer().serializeToString(svg).replace(/var\((--\w+)\)/g, (_, name) => colours.getPropertyValue(name));
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas"), pen = canvas.getContext("2d"), head = 30;
  [canvas.width, canvas.height] = [2 * width, 2 * (height + head)];
  pen.scale(2, 2);
  pen.fillStyle = colours.getPropertyValue("--ground");
  pen.fillRect(0, 0, width, height + head);
  pen.fillStyle = colours.getPropertyValue("--ink");
  pen.font = "600 14px system-ui, sans-serif";
  pen.fillText(document.getElementById("about").textContent, 8, 21, width - 16);
  pen.drawImage(image, 0, head, width, height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
};
for (const button of document.querySelectorAll("[data-image]")) {
  button.addEventListener("click", async () => {
    const name = button.dataset.image, made = picture(document.getElementById(`chart-${name}`));
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": made })]);
      say("copied as an image");
    } catch { // not allowed here: to be saved
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await made);
      link.download = link.textContent = `${name}.png`;
      button.replaceWith(link);
      say(`the browser does not let this page copy: save ${name}.png`);
    }
  });
}
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
const rank = (row, text) => (row.total ? 2 : text === "" ? 1 : 0);
const compare = (a, b) => {
  const x = Number(a), y = Number(b);
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return a.localeCompare(b);
};
// A table of many rows has the first in the page, and all as data: an element is made of a row once it is shown.
const element = (cells, heads, long) => {
  const row = document.createElement("tr");
  cells.forEach((cell, i) => {
    const [text, raw, titled] = [cell].flat(), kinds = heads[i].classList, made = row.insertCell();
    made.textContent = text;
    if (raw !== undefined) made.dataset.v = raw;
    if (titled) made.title = raw.slice(0, 1000);
    if (kinds.contains("right")) made.className = "right";
    else if (text.length > long) made.className = "long";
    if (kinds.contains("wraps")) made.classList.add("wraps");
  });
  return row;
};
const pager = (table) => document.querySelector(`[data-pages="${table.id}"]`);
const records = (table) => {
  const { rows, page, long, total } = JSON.parse(document.getElementById(`${table.id}-rows`).textContent);
  const all = rows.map((cells, i) => ({
    values: cells.map((cell) => [cell].flat().slice(0, 2).at(-1)),
    total: total && i === rows.length - 1,
    element() {
      const row = element(cells, table.tHead.rows[0].cells, long);
      if (this.total) row.className = "total";
      return row;
    },
  }));
  return Object.assign(all, { page });
};
const held = new Map();
const every = (table) => {
  if (!pager(table)) {
    return [...table.tBodies[0].rows].map((row) => ({
      values: [...row.cells].map(value), total: row.classList.contains("total"), element: () => row,
    }));
  }
  if (!held.has(table)) held.set(table, records(table));
  return held.get(table);
};
const turn = (table, rows, from = 0) => {
  table.tBodies[0].replaceChildren(...rows.slice(from, from + (rows.page ?? rows.length)).map((row) => row.element()));
  const box = pager(table)?.querySelector("select");
  if (!box) return;
  box.value = from;
  for (const button of pager(table).querySelectorAll("button")) button.disabled = !box.options[box.selectedIndex + Number(button.dataset.step)];
};
for (const box of document.querySelectorAll("[data-pages]")) {
  const table = document.getElementById(box.dataset.pages), list = box.querySelector("select");
  const go = (place) => turn(table, every(table), Number(list.options[place].value));
  list.addEventListener("change", () => go(list.selectedIndex));
  for (const button of box.querySelectorAll("button")) {
    button.hidden = false;
    button.disabled = button.dataset.step === "-1";
    button.addEventListener("click", () => go(list.selectedIndex + Number(button.dataset.step)));
  }
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const header = button.parentElement, table = header.closest("table"), column = header.cellIndex;
    const numbers = header.classList.contains("right");
    const now = header.getAttribute("aria-sort");
    const next = now === "none" ? (numbers ? "descending" : "ascending") : now === "descending" ? "ascending" : "descending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const rows = every(table);
    rows.sort((a, b) => {
      const x = a.values[column], y = b.values[column];
      return rank(a, x) - rank(b, y) || sign * compare(x, y);
    });
    turn(table, rows);
    say(`sorted by ${button.textContent}, ${next}`);
  });
}
const quoted = (text) => {
  const safe = /^[=+@]|^-(?![\d.])/.test(text) ? `'${text}` : text; // a name must not become a formula
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
const csv = (table) => {
  const keys = [...table.tHead.rows[0].cells].map((cell) => quoted(cell.dataset.key));
  const rows = every(table).map((row) => row.values.map(quoted).join(","));
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
const copies = (button, text, what) => button.addEventListener("click", async () => {
  window.flopwise.copied = text();
  say((await copy(window.flopwise.copied)) ? `copied ${what}` : "the browser does not let this page copy");
  button.focus();
});
for (const button of document.querySelectorAll("[data-copies]")) copies(button, () => csv(document.getElementById(button.dataset.copies)), "as CSV");
for (const button of document.querySelectorAll("[data-code]")) copies(button, () => `${button.nextElementSibling.textContent}\n`, "the code");

// A long table shows its first rows until asked; a table that goes on to the right says so.
for (const button of document.querySelectorAll("[data-rows]")) {
  const table = document.getElementById(button.dataset.rows);
  table.classList.add("some");
  button.hidden = false;
  if (pager(table)) pager(table).hidden = true;
  button.addEventListener("click", () => {
    table.classList.remove("some");
    if (pager(table)) pager(table).hidden = false;
    button.remove();
  });
}
const cue = (box) => box.parentElement.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
const sizes = new ResizeObserver((entries) => entries.forEach((entry) => cue(entry.target)));
for (const box of document.querySelectorAll(".scroll")) {
  box.addEventListener("scroll", () => cue(box), { passive: true });
  sizes.observe(box);
}

// A finding's link may lead into something folded.
const reveal = () => {
  const there = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!there) return;
  for (let fold = there.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  there.closest("table")?.classList.remove("some");
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
