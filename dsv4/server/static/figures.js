// Small plots of what the engine does: tokens a second, queue, cache hits, memory by kind.

import { make } from "./dom.js";

const PERIOD_MS = 1000;
const LENGTH = 90; // samples kept, one a period
const SVG = "http://www.w3.org/2000/svg";

export class Figures {
  constructor(root, getHeaders, onState) {
    this.getHeaders = getHeaders;
    this.onState = onState;
    this.last = null;
    this.plots = {
      rate: new Plot("Tokens/s"),
      queue: new Plot("Run + wait"),
      hits: new Plot("Prefix hits", (value) => `${Math.round(value)}%`, 100),
      step: new Plot("Step", (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`),
    };
    this.memory = make("div", { class: "figure broad" });
    root.append(...Object.values(this.plots).map((plot) => plot.node), this.memory);
    this.tick();
  }

  async tick() {
    if (!document.hidden) {
      try {
        const answer = await fetch("/stats", { headers: this.getHeaders() });
        this.onState(answer.status === 401 ? "needs an API key (Settings)" : null);
        if (answer.ok) this.take(await answer.json());
      } catch {
        this.onState("server not reached, trying again");
        this.last = null;
      }
    }
    setTimeout(() => this.tick(), PERIOD_MS);
  }

  take(stats) {
    this.onState(stats.state === "ready" ? "" : stats.state, stats.model);
    if (stats.num_steps === undefined) return;
    const now = performance.now();
    const before = this.last;
    this.last = { ...stats, now };
    this.plots.queue.add(stats.num_running + stats.num_waiting, `${stats.num_running} + ${stats.num_waiting}`);
    this.plots.step.add(stats.last_step_s * 1000);
    if (before && stats.num_output_tokens >= before.num_output_tokens) {
      const seconds = (now - before.now) / 1000;
      this.plots.rate.add((stats.num_output_tokens - before.num_output_tokens) / seconds);
    }
    const asked = stats.num_prefix_asked;
    this.plots.hits.add(asked ? (100 * stats.num_prefix_hit) / asked : 0, asked ? undefined : "–");
    this.showMemory(stats);
  }

  showMemory(stats) {
    const rows = Object.keys(stats.pages_total).map((pool) => {
      const total = stats.pages_total[pool] || 1;
      const bytes = (count) => count * (stats.page_bytes[pool] ?? 0);
      const used = make("i", { class: pool });
      const held = make("i", { class: `${pool} held` });
      used.style.width = `${(100 * stats.pages_used[pool]) / total}%`;
      held.style.width = `${(100 * stats.pages_cached[pool]) / total}%`;
      const label = `${stats.pages_used[pool]} pages in use, ${stats.pages_cached[pool]} kept for prefixes, of ${total}`;
      const size = `${sizeText(bytes(stats.pages_used[pool] + stats.pages_cached[pool]))} / ${sizeText(bytes(total))}`;
      return make("div", { class: "bar", title: label }, make("span", {}, pool),
        make("div", { class: "track", role: "img", "aria-label": label }, used, held), make("span", { class: "size" }, size));
    });
    this.memory.replaceChildren(make("div", { class: "name" }, "State in memory, by kind"), ...rows);
  }
}

class Plot {
  constructor(name, format = (value) => (value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value))), most = 0) {
    this.format = format;
    this.most = most;
    this.values = [];
    this.value = make("b", {}, "–");
    this.area = document.createElementNS(SVG, "path");
    this.line = document.createElementNS(SVG, "path");
    this.area.setAttribute("class", "area");
    this.line.setAttribute("class", "line");
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${LENGTH - 1} 30`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.append(this.area, this.line);
    this.node = make("div", { class: "figure" }, make("div", { class: "name" }, make("span", {}, name), this.value), svg);
  }

  add(value, text) {
    this.values = [...this.values.slice(1 - LENGTH), value];
    this.value.textContent = text ?? this.format(value);
    const most = this.most || Math.max(...this.values, 1e-9);
    const first = LENGTH - this.values.length;
    const points = this.values.map((y, at) => `${first + at},${(28 - (26 * y) / most).toFixed(2)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${first},30L${points.join("L")}L${LENGTH - 1},30Z`);
  }
}

function sizeText(bytes) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(bytes < 10 * size ? 1 : 0)} ${unit}`;
  }
  return `${bytes} B`;
}
