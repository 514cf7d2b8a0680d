// The dashboard's page. Everything that comes from records is set as text, never as markup.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const LOG_LINES = 500;
  let data = {};
  let chosen = new URLSearchParams(location.search).get("run");
  let events = null;
  let logSource = "", logAfter = -1, logTotal = 0, logBusy = false, logAgain = false;

  // --- small things ---------------------------------------------------------------------------------------
  function make(tag, options = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (value === undefined || value === null) continue;
      if (key === "text") element.textContent = value;
      else if (key === "class") element.className = value;
      else element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }
  const put = (parent, ...children) => parent.replaceChildren(...children);
  const clock = (ms) => ms ? new Date(ms).toLocaleTimeString([], { hour12: false }) : "–";
  function time(ms) {
    return make("time", { text: clock(ms), datetime: ms ? new Date(ms).toISOString() : null });
  }
  function took(ms) {
    if (ms === null || ms === undefined || ms < 0) return "–";
    if (ms < 1000) return `${Math.round(ms)} ms`;
    if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
    const minutes = Math.floor(ms / 60000);
    return minutes < 60 ? `${minutes} min ${Math.round(ms % 60000 / 1000)} s`
      : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  function bytes(count) {
    if (count === null || count === undefined) return "–";
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (count < 1000 || unit === "GB") return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
      count /= 1000;
    }
  }
  const lines = (count) => `${count} line${count === 1 ? "" : "s"}`;
  const number = (value, unit = "") => value === null || value === undefined ? "–" : `${value}${unit}`;
  const live = () => data.source && data.source.kind === "live" && !["ended", "failed"].includes((data.run || {}).state);
  const now = () => live() ? Date.now() : (data.run || {}).last_ms;
  const GOOD = ["serving", "ready", "ended", "done", "alive"], BAD = ["failed", "fault", "dead"];
  const tone = (word) => GOOD.includes(word) ? "ok" : BAD.includes(word) ? "bad"
    : ["suspect", "stopping", "lost", "cancelled"].includes(word) ? "warn" : "";
  const pill = (word) => make("span", { class: `pill ${tone(word)}`, text: word || "–" });
  const cell = (head, ...content) => make("td", { "data-h": head }, ...content.map((item) =>
    item instanceof Node ? item : document.createTextNode(item ?? "–")));
  const none = (text, tag = "li") => make(tag, { class: "empty", text });

  // --- sections -------------------------------------------------------------------------------------------
  function showRun() {
    const run = data.run;
    const state = $("state"), source = data.source || {};
    const word = run ? run.state : source.state || "connecting";
    const text = run && word !== "ended" && word !== "failed" ? `${word} · ${run.phase.replaceAll("_", " ")}` : word;
    if (state.textContent !== text) state.textContent = text;
    state.className = `state ${tone(word)}`;
    document.title = `${word} · swactor-mq`;
    const from = source.kind === "archive" ? `archive ${source.file}: ${source.state}` : `live: ${source.state}`;
    const torn = source.torn_bytes ? `, the last line is torn (${source.torn_bytes} bytes)` : "";
    $("source").textContent = from + torn + (source.bad_lines ? `, ${source.bad_lines} lines are no records` : "");
    if (!run) return;
    $("cause-box").hidden = run.state !== "failed";
    $("cause").textContent = `${run.phase.replaceAll("_", " ")}: ${run.cause}`;
    $("advice").hidden = !run.advice;
    $("advice").textContent = run.advice ? `What to do: ${run.advice}` : "";
    const facts = run.facts || {};
    const rows = [
      ["model", facts.model_id], ["provider", facts.provider], ["prompt RPC", facts.addr],
      ["workers", facts.pipeline_stages], ["began", run.began_ms ? new Date(run.began_ms).toLocaleString() : null],
      [live() ? "runs for" : "lasted", took(now() - run.began_ms)],
      ["ended", ["ended", "failed"].includes(run.state) ? `${run.how}: ${run.cause}` : null],
      ["configuration", facts.config_file], ["notes", (facts.notes || []).join(" ")],
    ].filter(([, value]) => value);
    put($("facts"), ...rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
  }

  function showPhases() {
    const steps = data.phases || [], begin = (data.run || {}).began_ms || 0;
    const ending = Math.max(now() || 0, ...steps.map((step) => step.end_ms || 0));
    const span = Math.max(1, ending - begin);
    put($("phases"), ...(steps.length ? steps.map((step) => {
      const end = step.end_ms || ending, running = !step.end_ms && live();
      const bar = make("i");
      bar.style.left = `${Math.min(99, 100 * (step.begin_ms - begin) / span)}%`;
      bar.style.width = `${Math.max(0, 100 * (end - step.begin_ms) / span)}%`;
      const failed = step.status === "failed";
      const duration = failed ? `failed` : running ? `${took(end - step.begin_ms)}…` : took(end - step.begin_ms);
      return make("li", { class: failed ? "failed" : running ? "running" : "" },
        make("span", { text: step.name }), make("span", { class: "track", "aria-hidden": "true" }, bar),
        make("span", { class: "took", text: duration }),
        step.error ? make("span", { class: "why", text: step.error }) : null);
    }) : [none("no phase has begun")]));
  }

  function memberOf(worker) {
    const members = (data.members || {}).now || [];
    const found = members.find((member) => worker.endpoint && member.peer === worker.endpoint);
    return found ? found.to : null;
  }

  function showWorkers() {
    const rows = data.workers || [];
    put($("workers").tBodies[0], ...(rows.length ? rows.map((worker) => {
      const cpu = worker.cpu || {}, memory = worker.memory || {}, progress = worker.progress;
      const state = [pill(worker.state)];
      if (progress && progress.total) {
        state.push(" ", make("progress", { max: progress.total, value: progress.done,
          "aria-label": `${progress.phase} of node ${worker.node_id}` }),
          ` ${progress.phase} ${Math.floor(100 * progress.done / progress.total)} %`);
      }
      if (worker.exit) state.push(make("div", { class: "quiet", text: worker.exit }));
      if (worker.error) state.push(make("div", { text: worker.error }));
      if (worker.starts > 1) state.push(make("div", { class: "quiet", text: `restarted ${worker.starts - 1}×` }));
      const layers = worker.layers && worker.layers[1] !== null ? `${worker.layers[0]}–${worker.layers[1] - 1}`
        : worker.layers_held ? `all ${worker.layers_held}` : "–";
      const gpus = (worker.gpus || []).map((gpu) => make("div", { text:
        `${gpu.name}: ${number(gpu.utilization_gpu_percent, " %")}, ${number(gpu.memory_used_mib)} of ${number(gpu.memory_total_mib)} MiB` }));
      const member = memberOf(worker);
      return make("tr", {},
        make("td", { "data-h": "Node", text: worker.node_id }), make("td", { "data-h": "" }, ...state),
        cell("Stage", number(worker.stage_index)), cell("Layers", layers), cell("Provider", worker.provider || "–"),
        cell("CPU", cpu.worker_percent === undefined ? "–" : `${number(cpu.worker_percent, " %")} of a core`,
          make("div", { class: "quiet", text: cpu.percent === undefined ? "" : `machine ${number(cpu.percent, " %")}` })),
        cell("Memory", bytes(memory.engine_rss_bytes), make("div", { class: "quiet",
          text: memory.available_bytes ? `${bytes(memory.available_bytes)} free` : "" })),
        cell("GPU", ...(gpus.length ? gpus : ["–"])), cell("Member", member ? pill(member) : "–"),
        cell("Price", worker.dph_total ? `$${worker.dph_total}/h` : "–"));
    }) : [make("tr", {}, make("td", { colspan: 10, class: "empty", text: "no worker yet" }))]));
    showPipeline(rows);
  }

  function showPipeline(rows) {
    const active = ((data.prompts || {}).rows || []).find((prompt) => prompt.state === "active");
    const rate = active && active.rate ? `${active.rate} tokens/s` : "";
    const edge = (id, workers) => {
      const ends = workers.map((worker) => (worker.edges || {})[id]).filter((item) => item);
      const path = workers.map((worker) => (worker.paths || {})[id]).find((item) => item) || "";
      const of = (key) => ends.map((end) => end[key]).find((value) => value !== undefined && value !== null);
      // An edge that rests sends no record: its last rate is no rate any more.
      const rates = ends.filter((end) => live() && now() - end.ms < 4000).map((end) => end.records_per_s || 0);
      const total = of("records") === undefined ? "" : `${of("records")} records`;
      const latency = of("latency_ms") === undefined ? "" : `${of("latency_ms").toFixed(1)} ms`;
      const moved = of("bytes") === undefined ? "" : bytes(of("bytes"));
      return make("li", { class: "edge", title: `edge ${id}${path ? ` by ${path}` : ""}: there and back, without the time of the stage` },
        make("span", { text: rates.length && Math.max(...rates) > 0 ? `${Math.max(...rates)} records/s` : rate || total }),
        make("span", { text: [latency, moved].filter((part) => part).join(" · ") || path }));
    };
    const gateway = (text) => make("li", { class: "node" }, make("b", { text: "gateway" }), make("span", { class: "quiet", text }));
    const items = [gateway("prompts in")];
    rows.forEach((worker, index) => {
      const class_ = worker.state === "ready" ? "node ready" : worker.state === "failed" ? "node failed" : "node";
      items.push(edge(worker.inbound_edge, index ? [worker, rows[index - 1]] : [worker]));
      items.push(make("li", { class: class_ }, make("b", { text: `node ${worker.node_id}` }),
        make("span", { class: "quiet", text: `stage ${number(worker.stage_index)} · ${worker.state || "–"}` })));
    });
    if (rows.length) items.push(edge(rows.at(-1).outbound_edge, [rows.at(-1)]), gateway("text out"));
    put($("pipeline"), ...items);
  }

  function showPrompts() {
    const { rows = [], counts = {}, tokens = 0 } = data.prompts || {};
    $("prompt-totals").textContent = `${counts.done || 0} done, ${counts.fault || 0} faulted, ` +
      `${counts.cancelled || 0} cancelled · ${tokens} tokens · ${rows.filter((row) => row.state === "queued").length} waiting`;
    put($("prompts").tBodies[0], ...(rows.length ? rows.slice(0, 50).map((prompt) => {
      const open = prompt.ended_ms === null;
      const count = prompt.max_tokens ? `${prompt.tokens} of ${prompt.max_tokens}` : `${prompt.tokens}`;
      const bar = prompt.max_tokens && open ? make("progress", { max: prompt.max_tokens, value: prompt.tokens,
        "aria-label": `tokens of prompt ${prompt.prompt_id}` }) : "";
      const end = open ? now() : prompt.ended_ms;
      return make("tr", {}, make("td", { "data-h": "Prompt", text: prompt.prompt_id }),
        make("td", { "data-h": "" }, pill(prompt.state)), cell("Tokens", count, " ", bar),
        cell("First token", prompt.first_ms ? took(prompt.first_ms - prompt.begin_ms) : "–"),
        cell("Tokens/s", number(prompt.rate)), cell("Time", took(end - prompt.begin_ms)),
        make("td", { "data-h": "", class: "long", text: prompt.finish || "" }));
    }) : [make("tr", {}, make("td", { colspan: 7, class: "empty", text: "no prompt yet" }))]));
  }

  function showFaults() {
    const rows = (data.faults || []).slice().reverse();
    put($("faults"), ...(rows.length ? rows.map((fault) => make("li", {}, time(fault.ms),
      make("b", { text: fault.phase.replaceAll("_", " ") + (fault.node_id ? ` (node ${fault.node_id})` : "") }),
      fault.cause)) : [none("none")]));
  }

  function showMembers() {
    const moves = ((data.members || {}).transitions || []).map((move) => ({ ms: move.ms, parts: [
      make("b", { text: move.logical_id || move.peer }), `${move.from} → `, pill(move.to), ` ${move.reason || ""}`] }));
    const kinds = { node_actor: "route", datastream_publisher: "stream's route" };
    const checks = (data.routes || []).map((route) => ({ ms: route.ms, parts: [
      make("b", { text: `node ${route.node_id}` }),
      route.to ? `${kinds[route.kind] || "route"} ${route.from} → ${route.to}: ${route.reason}`
        : route.route_matches_ready ? "route goes to the worker" : `no route (check ${number(route.attempt)}, member ${route.member_state})`] }));
    const rows = moves.concat(checks).sort((a, b) => b.ms - a.ms);
    put($("members"), ...(rows.length ? rows.map((row) => make("li", {}, time(row.ms), ...row.parts)) : [none("nothing yet")]));
  }

  function showStreams() {
    const { streams = {}, lost = {}, missed = 0 } = data.streams || {};
    $("stream-gaps").textContent = missed ? `${missed} frames passed before this page's server could read them` : "";
    put($("streams").tBodies[0], ...Object.entries(streams).map(([name, row]) => make("tr", {},
      cell("Stream", name), cell("Frames", String(row.frames)), cell("Bytes", bytes(row.bytes)),
      cell("Lost", String(lost[name] || 0)),
      make("td", { class: "long quiet", text: Object.entries(row.channels).map(([channel, count]) => `${channel} ${count}`).join(", ") }))));
  }

  // --- logs -----------------------------------------------------------------------------------------------
  function showLogSources() {
    const sources = Object.keys(data.log_sources || {}), pick = $("log-source");
    if (sources.join("\n") !== [...pick.options].map((option) => option.value).join("\n")) {
      put(pick, ...sources.map((source) => make("option", { value: source, text: source.replace(".", " ") })));
      if (!sources.includes(logSource)) logSource = sources.find((source) => source.endsWith("stderr")) || sources[0] || "";
      pick.value = logSource;
      restartLog();
    } else if ((data.log_sources[logSource] || 0) !== logTotal) readLog();
  }
  function restartLog() {
    logAfter = -1;
    put($("log-box"));
    $("log-count").textContent = "";
    readLog();
  }
  async function readLog() {
    if (!logSource) return;
    if (logBusy) { logAgain = true; return; }
    logBusy = true;
    const search = $("log-search").value, source = logSource, after = logAfter;
    try {
      const query = new URLSearchParams({ source, search, limit: LOG_LINES, after });
      if (after < 0) query.delete("after");
      if (chosen) query.set("run", chosen);
      const found = await (await fetch(`/api/logs?${query}`)).json();
      if (source === logSource && search === $("log-search").value && after === logAfter) addLines(found, search);
    } catch (error) {
      $("log-count").textContent = "the server does not answer";
    }
    logBusy = false;
    if (logAgain) { logAgain = false; readLog(); }
  }
  function addLines(found, search) {
    const box = $("log-box");
    logTotal = found.total;
    for (const [seq, ms, text] of found.lines) {
      const line = make("div", {}, make("span", { text: clock(ms) }));
      line.append(...marked(text, search));
      box.append(line);
      logAfter = Math.max(logAfter, seq);
    }
    while (box.childElementCount > LOG_LINES * 2) box.firstElementChild.remove();
    $("log-count").textContent = search ? `${box.childElementCount} of ${lines(found.total)}` : lines(found.total);
    if ($("log-follow").checked) box.scrollTop = box.scrollHeight;
  }
  function marked(text, search) {
    if (!search) return [text];
    const parts = [], low = text.toLowerCase(), word = search.toLowerCase();
    let at = 0;
    for (let hit = low.indexOf(word); hit >= 0; hit = low.indexOf(word, at)) {
      parts.push(text.slice(at, hit), make("mark", { text: text.slice(hit, hit + word.length) }));
      at = hit + word.length;
    }
    return [...parts, text.slice(at)];
  }

  // --- runs and events ------------------------------------------------------------------------------------
  function showRuns() {
    const pick = $("run");
    const options = (data.runs || []).map((run) => [String(run.number), `${run.number} · ${run.state}` +
      (run.began_ms ? ` · ${new Date(run.began_ms).toLocaleString()}` : "")]);
    const same = options.map((option) => option.join()).join() === [...pick.options].map((option) => `${option.value},${option.text}`).join();
    if (!same && document.activeElement !== pick) put(pick, ...options.map(([value, text]) => make("option", { value, text })));
    const shown = chosen || String((data.run || {}).number || "");
    if (document.activeElement !== pick) pick.value = shown;
  }
  const SHOW = { run: showRun, source: showRun, runs: showRuns, phases: showPhases, workers: showWorkers,
    prompts: () => { showPrompts(); showPipeline(data.workers || []); }, members: () => { showMembers(); showWorkers(); },
    routes: showMembers, faults: showFaults, streams: showStreams, log_sources: showLogSources };
  function update(changes) {
    if (changes.run && data.run && changes.run.number !== data.run.number) { data = {}; logSource = ""; }
    Object.assign(data, changes);
    new Set(Object.keys(changes).map((section) => SHOW[section])).forEach((show) => show && show());
  }
  function connect() {
    if (events) events.close();
    events = new EventSource(chosen ? `/events?run=${encodeURIComponent(chosen)}` : "/events");
    events.addEventListener("state", (event) => update(JSON.parse(event.data)));
    events.onerror = () => {
      $("state").textContent = "the server does not answer";
      $("state").className = "state warn";
      if (events.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
    };
  }
  $("run").addEventListener("change", (event) => {
    const newest = data.runs && data.runs[0] && String(data.runs[0].number) === event.target.value;
    chosen = newest ? null : event.target.value;
    history.replaceState(null, "", chosen ? `?run=${chosen}` : location.pathname);
    connect();
  });
  $("log-source").addEventListener("change", (event) => { logSource = event.target.value; restartLog(); });
  let typing = 0;
  $("log-search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(restartLog, 200); });
  $("log-box").addEventListener("scroll", () => {
    const box = $("log-box");
    if (box.scrollTop + box.clientHeight < box.scrollHeight - 40) $("log-follow").checked = false;
  });
  $("log-follow").addEventListener("change", (event) => { if (event.target.checked) $("log-box").scrollTop = $("log-box").scrollHeight; });
  setInterval(() => { if (live()) { showRun(); showPhases(); showPrompts(); } }, 1000);
  connect();
})();
