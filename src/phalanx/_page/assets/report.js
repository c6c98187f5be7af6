"use strict";
const report = (() => {
  const byId = (id) => document.getElementById(id);
  let data = null;

  // --- the log: search, ranks, streams. All of it may come and go in a live page, so nothing of it is held.

  const parseRanks = (text) => {
    const ranks = new Set();
    for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
      const found = /^(\d{1,7})(?:-(\d{1,7}))?$/.exec(part);
      if (!found) return null;
      for (let rank = +found[1]; rank <= Math.min(+(found[2] ?? found[1]), +found[1] + 100000); rank++) ranks.add(String(rank));
    }
    return ranks;
  };

  const filter = () => {
    if (!byId("filter")) return;
    const lines = document.querySelectorAll("#lines .l");
    const query = byId("q").value.toLowerCase();
    const ranks = parseRanks(byId("r").value);
    const stream = byId("s").value;
    byId("r").setAttribute("aria-invalid", String(ranks === null));
    let count = 0;
    for (const line of lines) {
      const shown = (!ranks?.size || ranks.has(line.dataset.r))
        && (!stream || line.classList.contains(stream))
        && (!query || line.lastElementChild.textContent.toLowerCase().includes(query));
      line.hidden = !shown;
      count += shown;
    }
    const all = `${lines.length.toLocaleString("en")} line${lines.length === 1 ? "" : "s"}`;
    byId("found").textContent = ranks === null ? "Ranks are written so: 0,4-7"
      : count === lines.length ? all : `${count.toLocaleString("en")} of ${all}`;
  };

  const clear = (ranks = "") => {
    byId("q").value = byId("s").value = "";
    byId("r").value = ranks;
    filter();
  };

  let timer = 0;
  const onFilter = (kind, act) => document.addEventListener(kind, (event) => {
    if (event.target.closest?.("#filter")) act(event);
  });
  onFilter("input", () => {
    clearTimeout(timer);
    if (document.querySelectorAll("#lines .l").length > 5000) timer = setTimeout(filter, 200);
    else filter();
  });
  onFilter("change", filter);
  onFilter("submit", (event) => { event.preventDefault(); filter(); });
  onFilter("reset", (event) => { event.preventDefault(); clear(); });

  // --- jumps: what is folded or filtered away is opened first

  const reveal = () => {
    // All ids are ASCII without %, so nothing is to be decoded, which fails for what a mail has mangled.
    const target = byId(location.hash.slice(1));
    if (!target) return;
    for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    if (target.hidden) clear();
    target.scrollIntoView({ block: "center" });
  };
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    const jump = event.target.closest("a.jump");
    if (jump) clear(jump.dataset.ranks);
  });

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });

  // --- plots

  const MOST_LINES = 12;
  const COLOURS = ["#3b76e0", "#c77700", "#0a8f6a", "#a45cc2", "#b8860b", "#008fa8", "#d2557f", "#7a8794",
    "#5f6fd0", "#8a9a1e", "#b5654a", "#4f9d9d"];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const duration = (seconds) => {
    if (seconds > 0 && seconds < 10) return `${Number(seconds.toFixed(2))}s`;
    const whole = Math.round(seconds);
    if (whole < 60) return `${whole}s`;
    if (whole < 3600) return `${Math.floor(whole / 60)}m${whole % 60 ? String(whole % 60).padStart(2, "0") + "s" : ""}`;
    return `${Math.floor(whole / 3600)}h${String(Math.floor(whole % 3600 / 60)).padStart(2, "0")}m`;
  };
  const format = (unit) => (value) => {
    if (value === null || value === undefined) return "";
    if (unit === "B") {
      const index = value > 0 ? Math.max(0, Math.min(4, Math.floor(Math.log2(value) / 10))) : 0;
      return `${(value / 1024 ** index).toPrecision(3).replace(/\.0+$/, "")} ${["B", "KiB", "MiB", "GiB", "TiB"][index]}`;
    }
    return `${Number(value.toPrecision(3))}${unit && " " + unit}`;
  };

  const quantile = (sorted, share) => sorted.length ? sorted[Math.floor((sorted.length - 1) * share)] : null;

  const band = (plot) => {
    const columns = data.times.map((_, index) =>
      plot.values.map((values) => values[index]).filter((value) => value !== null).sort((a, b) => a - b));
    return [0, .5, 1].map((share) => columns.map((column) => quantile(column, share)));
  };

  const valuesOf = (plot) => plot.ranks.length <= MOST_LINES ? plot.values : band(plot);

  const draw = (plot, figure) => {
    const few = plot.ranks.length <= MOST_LINES;
    const show = format(plot.unit);
    const accent = colour("--accent");
    const text = colour("--muted");
    const axis = { stroke: text, grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const series = few
      ? plot.ranks.map((rank, index) => ({ label: `rank ${rank}`, stroke: COLOURS[index % COLOURS.length], width: 1.5, value: (_, v) => show(v) }))
      : ["lowest", "median", "highest"].map((label, index) => ({ label, stroke: index === 1 ? accent : text, width: index === 1 ? 2 : 1, value: (_, v) => show(v) }));
    const bytes = plot.unit === "B" && { incrs: Array.from({ length: 60 }, (_, power) => 2 ** power) };
    const options = {
      width: figure.clientWidth, height: 180,
      cursor: { sync: { key: "all" }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.05] } },
      axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map(duration) }, { ...axis, size: 64, ...bytes, values: (_, ticks) => ticks.map(show) }],
      series: [{ label: "time", value: (_, v) => v === null ? "" : duration(v) }, ...series],
      legend: { show: true, live: true },
    };
    const chart = new uPlot(options, [data.times, ...valuesOf(plot)], figure.querySelector(".here"));
    chart.root.querySelector("canvas").setAttribute("role", "img");
    chart.root.querySelector("canvas").setAttribute("aria-label", `${plot.title} over time; the table below has its numbers`);
    return chart;
  };

  const heat = (plot, figure) => {
    const canvas = figure.querySelector("canvas.heat");
    const [columns, rows] = [data.times.length, plot.ranks.length];
    [canvas.width, canvas.height] = [columns, rows];
    const context = canvas.getContext("2d");
    const known = plot.values.flat().filter((value) => value !== null).sort((a, b) => a - b);
    // One first step that takes a minute must not hide a rank that is always twice as slow as the others.
    const low = known[0] ?? 0;
    const high = Math.min(known.at(-1) ?? 1, Math.max(4 * quantile(known, .5), low)) || 1;
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const channels = (name) => { probe.fillStyle = colour(name); probe.fillRect(0, 0, 1, 1); return probe.getImageData(0, 0, 1, 1).data; };
    const [from, to] = [channels("--panel"), channels("--accent")];
    const image = context.createImageData(columns, rows);
    plot.values.forEach((values, row) => values.forEach((value, column) => {
      const at = (row * columns + column) * 4;
      if (value === null) return;
      const share = .08 + .92 * Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
      for (let channel = 0; channel < 3; channel++) image.data[at + channel] = from[channel] + (to[channel] - from[channel]) * share;
      image.data[at + 3] = 255;
    }));
    context.putImageData(image, 0, 0);
    const output = figure.querySelector("figcaption output");
    canvas.onmousemove = (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns)));
      const row = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows)));
      output.textContent = `rank ${plot.ranks[row]} at ${duration(data.times[column])}: ${format(plot.unit)(plot.values[row][column]) || "not known"}`;
    };
    canvas.onmouseleave = () => { output.textContent = ""; };
  };

  const make = (name, parent, text = "", className = "") => {
    const one = parent.appendChild(document.createElement(name));
    one.textContent = text;
    one.className = className;
    return one;
  };

  let drawn = [];  // of each plot: what it is of, its figure, and its chart

  const figureOf = (plot) => {
    const figure = make("figure", byId("charts"));
    const caption = make("figcaption", figure);
    make("span", caption, plot.title);
    make("output", caption);
    make("div", figure, "", "here");
    if (plot.ranks.length > MOST_LINES) {
      const canvas = make("canvas", figure, "", "heat");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${plot.title} of ${plot.ranks.length} ranks over time, a row for each rank; the table below has the numbers`);
      const axis = make("div", figure, "", "heat-axis");
      make("span", axis, `ranks ${plot.ranks[0]} (top) to ${plot.ranks.at(-1)}`);
      make("span", axis, "stronger: more");
    }
    return figure;
  };

  // Show the data: in the charts of the same ranks that are there; one that is zoomed stays so.
  const replot = () => {
    const known = new Map(drawn.map((one) => [one.key, one]));
    drawn = data.plots.map((plot, index) => {
      const key = JSON.stringify([plot.name, plot.ranks]);
      const [old, place] = [known.get(key), byId("charts").children[index] ?? null];
      known.delete(key);
      const figure = old?.figure ?? figureOf(plot);
      if (figure !== place) byId("charts").insertBefore(figure, place);
      if (plot.ranks.length > MOST_LINES) heat(plot, figure);
      if (!old) return { key, figure, chart: draw(plot, figure) };
      const [times, { min, max }] = [old.chart.data[0], old.chart.scales.x];
      const isZoomed = min > times[0] || max < times.at(-1);
      old.chart.setData([data.times, ...valuesOf(plot)], !isZoomed);
      if (isZoomed) old.chart.setScale("x", { min, max });
      return old;
    });
    for (const { chart, figure } of known.values()) {
      chart.destroy();
      figure.remove();
    }
  };

  const redraw = () => {
    for (const { chart, figure } of drawn) {
      chart.destroy();
      figure.remove();
    }
    drawn = [];
    replot();
  };

  // Bring to life what the page has now: at its start, and in a live page after each change.
  const renew = (found) => {
    data = found;
    if (byId("filter")) byId("filter").hidden = false;
    filter();
    replot();
  };

  renew(JSON.parse(byId("data").textContent));
  reveal();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", () => {
    for (const { chart, figure } of drawn) chart.setSize({ width: figure.clientWidth, height: 180 });
  });
  return { renew };
})();
