(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const isSeen = () => document.visibilityState === "visible";

  // --- the line on top

  let heard = Date.now();  // when the server last answered
  let lost = "";  // that moment, once it does not any more

  const show = (text, isBad) => {
    const line = byId("live");
    if (line.textContent !== text) line.textContent = text;
    line.classList.toggle("bad", isBad);
  };
  const showLive = () => {
    [heard, lost] = [Date.now(), ""];
    show(root.dataset.status, false);
  };
  const showLost = (why, hope = ", and goes on by itself") => {
    lost ||= new Date(heard).toLocaleTimeString("en-GB");  // the page has the server's clock, in its zone
    show(`${why} This page is as it was at ${lost} by this browser's clock${hope}.`, true);
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
  };

  let [isBusy, isWanted] = [false, false];

  const MOST_HEAD = 1000;  // characters, of which the first are this page's own

  const update = async () => {
    isWanted = true;
    if (isBusy) return;
    isBusy = true;
    try {
      while (isWanted && isSeen()) {
        isWanted = false;
        const text = await get();
        if (text === null) break;
        if (text.slice(0, MOST_HEAD).includes(`data-version="${root.dataset.version}"`)) {
          showLive();
          continue;
        }
        const began = performance.now();
        const next = new DOMParser().parseFromString(text, "text/html");
        if (next.documentElement.dataset.version) {
          take(next);
          showLive();
        } else showLost("Something else answers in the server's place.");
        // A page that takes its time must not take all of the browser's.
        await new Promise((done) => { setTimeout(done, 4 * (performance.now() - began)); });
      }
    } finally {
      isBusy = false;
    }
  };

  const MAKING = 75_000;  // a server that takes longer for a page says so before

  // Return this page as it is now; null if the server is gone, or refuses it, which is shown.
  const get = async () => {
    try {
      const settings = { cache: "no-store", redirect: "error", signal: AbortSignal.timeout(MAKING) };
      const answer = await fetch(location.pathname, settings);
      const text = await answer.text();
      if (answer.ok) return text;
      if (answer.status === 404) showLost("The server has no such run any more: its folder is not there.", "");
      else showLost(`The server answers: ${text.slice(0, 300).trim() || answer.status}.`.replace(/\.+$/, "."));
    } catch (error) {
      showLost(error.name === "TimeoutError" ? "The server does not answer." : "The server is gone.");
    }
    return null;
  };

  // --- the stream that says when

  const PATIENCE = 40_000;  // a stream has an event at least every 15 s
  const AGAIN = 5000;
  const LOOK = 10_000;

  // A browser has six connections to a server, for all of its windows: streams that took them all would keep out pages
  // and buttons. So some pages have a stream, each with a lock; one more that is seen looks now and then.
  const MOST_STREAMS = 4;

  // Take one of the streams. Returns what gives it back; null: there is none left, or the browser cannot count them.
  const takeStream = async () => {
    for (let number = 0; navigator.locks && number < MOST_STREAMS; number++) {
      const giveBack = await new Promise((found) => {
        const keep = (lock) => lock ? new Promise((end) => { found(end); }) : found(null);
        navigator.locks.request(`phalanx-${number}`, { ifAvailable: true }, keep).catch(() => found(null));
      });
      if (giveBack) return giveBack;
    }
    return null;
  };

  let [source, giveBack, timer, turn] = [null, null, 0, 0];

  const later = (milliseconds, act) => {
    clearTimeout(timer);
    timer = setTimeout(act, milliseconds);
  };

  const disconnect = () => {
    turn += 1;
    clearTimeout(timer);
    source?.close();
    giveBack?.();
    source = giveBack = null;
  };

  const connect = async () => {
    disconnect();
    const own = turn;
    const found = await takeStream();
    if (own !== turn) return found?.();  // meanwhile, nobody sees it, or it was connected once more
    if (!found) {
      update();
      return later(LOOK, connect);
    }
    giveBack = found;
    source = new EventSource(root.dataset.events);
    source.addEventListener("changed", hear);
    source.addEventListener("keep", hear);
    source.addEventListener("error", () => {
      disconnect();
      update();  // which says what is wrong
      later(AGAIN, connect);
    });
    return later(PATIENCE, missAnswer);
  };

  const hear = (event) => {
    later(PATIENCE, missAnswer);
    if (lost || event.data !== root.dataset.version) update();
    else showLive();
  };

  const missAnswer = () => {
    showLost("The server does not answer.");
    connect();
  };

  // A page that nobody sees asks for nothing.
  document.addEventListener("visibilitychange", () => { if (isSeen()) connect(); else disconnect(); });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => { if (event.persisted && isSeen()) connect(); });

  // --- control

  const SURE = {
    "stop": (name) => `Stop ${name}?`,
    "stop-now": (name) => `Stop ${name} now, without a grace period?`,
    "restart": (name) => `Stop the ranks of ${name}, and start them again?`,
  };
  const ANSWER = 60_000;  // a server that takes longer to act says so before
  let asked = null;  // the button whose answer has not come yet;
  let pressed = null;  // and the last one

  const act = async (button, { path, name }) => {
    const { do: word } = button.dataset;
    if (asked) {
      if (asked !== button) answer(`${button.textContent}: not asked: ${asked.textContent} is not answered yet`, false);
      return;
    }
    if (SURE[word] && !confirm(SURE[word](name))) return;
    asked = pressed = button;
    answer(`${button.textContent}: asked …`, true);
    try {
      const headers = { "Content-Type": "application/json", "X-Phalanx": "1" };
      const settings = { headers, body: JSON.stringify({ do: word }), redirect: "error" };
      const found = await fetch(path, { method: "POST", signal: AbortSignal.timeout(ANSWER), ...settings });
      const text = await found.text();
      if (found.headers.get("Content-Type")?.startsWith("application/json")) {
        const { ok, text: words } = JSON.parse(text);
        answer(`${button.textContent}: ${words}`, ok);
      } else answer(`${button.textContent}: ${text.slice(0, 300)}`, false);
    } catch (error) {
      answer(`${button.textContent}: the server does not answer: whether it has acted is not known`, false);
    } finally {
      asked = null;
    }
  };

  // What is read aloud when it changes is there from the start.
  const answer = (text, isGood) => {
    byId("answered").parentElement.hidden = false;
    byId("answered").textContent = text;
    byId("answered").classList.toggle("bad", !isGood);
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("#control button");
    if (button) act(button, byId("control").dataset);
    if (event.target.closest("#answer button")) {
      byId("answered").parentElement.hidden = true;
      if (pressed?.isConnected) pressed.focus();
    }
  });

  strip(document);
  if (!location.hash) openAtEnd();
  if (isSeen()) connect();
})();
