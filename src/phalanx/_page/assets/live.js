(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const clock = () => new Date().toLocaleTimeString("en-GB");
  const isSeen = () => document.visibilityState === "visible";

  // --- the line on top

  let lost = "";  // since when the server is gone

  const show = (text, isBad) => {
    const line = byId("live");
    if (line.textContent !== text) line.textContent = text;
    line.classList.toggle("bad", isBad);
  };
  const showStatus = () => { if (!lost) show(root.dataset.status, false); };
  const showLost = (why) => {
    lost ||= clock();
    show(`${why} This page is as it was at ${lost}, and goes on by itself.`, true);
  };

  // --- the lines of the log: those that are there stay where they are, with what is selected in them

  const MOST_ROWS = 200;
  const keyOf = (row) => `${row.className} ${row.dataset.r} ${row.textContent}`;

  const mergeLines = (lines, fresh) => {
    const wasAtEnd = isAtEnd(lines);
    const rows = [...lines.querySelectorAll(".l")];
    const places = new Map();
    rows.forEach((row, index) => {
      const key = keyOf(row);
      if (places.has(key)) places.get(key).push(index);
      else places.set(key, [index]);
    });
    let last = -1;
    const merged = [...fresh.querySelectorAll(".l")].map((row) => {
      const found = places.get(keyOf(row)) ?? [];
      while (found.length && found[0] <= last) found.shift();
      if (!found.length) return [row, null];
      last = found.shift();
      return [row, rows[last]];
    });
    const kept = new Set(merged.map(([, row]) => row));
    for (const row of rows) if (!kept.has(row)) row.remove();
    for (const chunk of [...lines.children]) if (!chunk.childElementCount) chunk.remove();
    let before = null;
    for (const [row, own] of merged) {
      const line = own ?? document.importNode(row, true);
      if (row.id) line.id = row.id;
      else line.removeAttribute("id");
      if (!own) insert(lines, line, before);
      before = line;
    }
    if (wasAtEnd) toEnd(lines);
  };

  // Put a new line behind another one, null: before all. A chunk that is full, or comes first, is followed by another.
  const insert = (lines, line, before) => {
    const chunk = before?.parentNode;
    if (chunk && (before !== chunk.lastElementChild || chunk.childElementCount < MOST_ROWS)) return before.after(line);
    const next = document.createElement("div");
    next.className = "chunk";
    if (chunk) chunk.after(next);
    else lines.prepend(next);
    next.append(line);
    for (const one of lines.children) one.classList.toggle("whole", one !== lines.lastElementChild);
  };

  // The log of a run that goes on opens at its end.
  const openAtEnd = () => { if (byId("lines")?.dataset.end !== undefined) toEnd(byId("lines")); };

  const isAtEnd = (lines) => lines.scrollHeight - lines.scrollTop - lines.clientHeight <= 40;

  // Lines have their height once they are laid out, which is when they are nearly seen.
  const toEnd = (lines, tries = 10) => {
    lines.scrollTop = lines.scrollHeight;
    const check = () => { if (tries && !isAtEnd(lines)) toEnd(lines, tries - 1); };
    requestAnimationFrame(() => requestAnimationFrame(check));
  };

  // --- what is new

  const OWN = new Set(["control", "filter", "charts"]);  // their content is the browser's
  const MORPHED = ["header.top", "nav", "main", "footer"];

  const callbacks = {
    beforeNodeMorphed: (old, fresh) => {
      if (old.id === "lines") mergeLines(old, fresh);
      return old.id !== "lines" && !(OWN.has(old.id) && old.id === fresh.id);
    },
  };

  // Spaces between blocks are alike: one of them, taken for another, has all that lies between them moved, and what is
  // moved forgets how far it was scrolled.
  const BLOCKS = "main, section, article, details, ul, dl, tbody, svg, g";
  const strip = (page) => {
    for (const block of page.querySelectorAll(BLOCKS)) {
      for (const node of [...block.childNodes]) if (node.nodeType === Node.TEXT_NODE && !node.data.trim()) node.remove();
    }
  };

  const take = (next) => {
    const policy = (page) => page.querySelector("meta[http-equiv]").content;
    if (policy(next) !== policy(document)) {  // another Phalanx, with another script
      location.reload();
      return;
    }
    strip(next);
    for (const fresh of next.querySelectorAll("details[id]")) {
      const old = byId(fresh.id);
      if (old) fresh.open = old.tagName !== "DETAILS" || old.open;
    }
    const isFirst = !byId("lines");
    for (const name of MORPHED) {
      const [old, fresh] = [document.querySelector(name), next.querySelector(name)];
      if (old && fresh) Idiomorph.morph(old, fresh, { callbacks });
    }
    if (isFirst) openAtEnd();
    document.title = next.title;
    Object.assign(root.dataset, { ...next.documentElement.dataset });
    if (byId("data")) report.renew(JSON.parse(next.getElementById("data").textContent));
    showStatus();
  };

  let [isBusy, isWanted] = [false, false];

  const update = async () => {
    isWanted = true;
    if (isBusy) return;
    isBusy = true;
    try {
      while (isWanted && isSeen()) {
        isWanted = false;
        const text = await get();
        if (text === null) break;
        const began = performance.now();
        const next = new DOMParser().parseFromString(text, "text/html");
        if (next.documentElement.dataset.version) take(next);
        else showLost("Something else answers in the server's place.");
        // A page that takes its time must not take all of the browser's.
        await new Promise((done) => { setTimeout(done, 4 * (performance.now() - began)); });
      }
    } finally {
      isBusy = false;
    }
  };

  // Return this page as it is now; null if the server is gone, or refuses it, which is shown.
  const get = async () => {
    try {
      const answer = await fetch(location.pathname, { cache: "no-store", redirect: "error" });
      if (answer.ok) return await answer.text();
      await showRefusal(answer);
    } catch {
      showLost("The server is gone.");
    }
    return null;
  };

  const showRefusal = async (answer) => {
    const text = (await answer.text()).slice(0, 300).trim();
    showLost(`The server answers: ${text || answer.status}.`.replace(/\.+$/, "."));
  };

  // --- the stream that says when

  let [source, again] = [null, 0];

  const connect = () => {
    clearTimeout(again);
    source?.close();
    source = new EventSource(root.dataset.events);
    source.addEventListener("open", () => {
      const wasLost = lost;
      lost = "";
      showStatus();
      if (wasLost) update();
    });
    source.addEventListener("changed", (event) => { if (event.data !== root.dataset.version) update(); });
    source.addEventListener("error", () => {
      showLost("The server is gone.");
      if (source.readyState === EventSource.CLOSED) refused();  // else the browser tries again by itself
    });
  };

  // No stream was answered: ask with which words.
  const refused = async () => {
    again = setTimeout(connect, 5000);
    const asking = new AbortController();
    try {
      const answer = await fetch(root.dataset.events, { cache: "no-store", redirect: "error", signal: asking.signal });
      if (!answer.ok) await showRefusal(answer);
    } catch {
      // It is gone, as the line says.
    } finally {
      asking.abort();  // a stream has no end
    }
  };

  // A page that nobody sees asks for nothing, and takes none of the few connections that a browser has to a server.
  document.addEventListener("visibilitychange", () => {
    if (isSeen()) connect();
    else { clearTimeout(again); source?.close(); }
  });
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });

  // --- control

  const SURE = {
    "stop": (name) => `Stop ${name}?`,
    "stop-now": (name) => `Stop ${name} now, without a grace period?`,
    "restart": (name) => `Stop the ranks of ${name}, and start them again?`,
  };
  let isAsking = false;

  const act = async (button, { path, name }) => {
    const { do: word } = button.dataset;
    if (isAsking || (SURE[word] && !confirm(SURE[word](name)))) return;
    isAsking = true;
    answer(`${button.textContent}: asked …`, true);
    try {
      const headers = { "Content-Type": "application/json", "X-Phalanx": "1" };
      const found = await fetch(path, { method: "POST", headers, body: JSON.stringify({ do: word }), redirect: "error" });
      const text = await found.text();
      if (found.headers.get("Content-Type")?.startsWith("application/json")) {
        const { ok, text: words } = JSON.parse(text);
        answer(`${button.textContent}: ${words}`, ok);
      } else answer(`${button.textContent}: ${text.slice(0, 300)}`, false);
    } catch (error) {
      answer(`${button.textContent}: the server does not answer`, false);
    } finally {
      isAsking = false;
    }
  };

  const answer = (text, isGood) => {
    byId("answer").hidden = false;
    byId("answered").textContent = text;
    byId("answered").classList.toggle("bad", !isGood);
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("#control button");
    if (button) act(button, byId("control").dataset);
    if (event.target.closest("#answer button")) byId("answer").hidden = true;
  });

  strip(document);
  if (!location.hash) openAtEnd();
  if (isSeen()) connect();
})();
