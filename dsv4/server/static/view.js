// Messages as elements. An element is made once and filled again whenever its message changes.

import { button, copyText, make } from "./dom.js";
import { render } from "./markdown.js";
import { children, isOpen, path } from "./store.js";

const FINISH = {
  stop: "complete", length: "cut at the token limit", tool_calls: "waits for a result", stopped: "stopped by you",
  interrupted: "interrupted; kept as far as it came", content_filter: "filtered",
};

export function emptyNode(examples, act) {
  return make("div", { class: "empty" }, make("h2", {}, "Ask something"), make("p", {}, "Conversations stay in this browser."),
    make("div", { class: "examples" }, ...examples.map((text) => button(text, () => act.send(text)))));
}

export function messageNode(chat, node, act) {
  const article = make("article", { class: `message ${node.role}`, "data-id": node.id });
  article.append(make("span", { class: "who" }, { user: "You said:", assistant: "Answer:", tool: "Result of a call:" }[node.role]));
  const parts = node.role === "assistant" ? ["before", "md", "calls", "foot"] : ["before", "text", "foot"];
  for (const name of parts) article.append(make("div", { class: name }));
  fill(article, chat, node, act);
  return article;
}

export function fill(article, chat, node, act) {
  const part = (name) => article.querySelector(`:scope > .${name}`);
  const isWriting = isOpen(node);
  article.classList.toggle("open", isWriting);
  article.classList.toggle("waiting", isWriting && !node.content && !node.reasoning_content && !node.tool_calls);
  if (node.role === "tool") {
    if (!part("before").firstChild) part("before").append(disclosure("call", "Result given", make("div", { class: "inside" }, node.content)));
    part("text").hidden = true;
    return;
  }
  if (node.role === "user") {
    part("before").replaceChildren(...(node.files ?? []).map(fileNode));
    part("text").textContent = node.content;
    part("text").hidden = !node.content;
  } else {
    fillReasoning(part("before"), node, isWriting);
    render(node.content, part("md"));
    part("md").hidden = !node.content;
    fillCalls(part("calls"), chat, node, isWriting, act);
  }
  if (isWriting) part("foot").replaceChildren();
  else part("foot").replaceChildren(...footer(chat, node, act));
}

function disclosure(kind, title, ...inside) {
  return make("details", { class: kind }, make("summary", {}, title), ...inside);
}

const fileNode = (file) => disclosure("file", `${file.name} (${file.text.length} characters)`, make("div", { class: "inside", tabindex: "0" }, file.text));

function fillReasoning(place, node, isWriting) {
  if (!node.reasoning_content) return place.replaceChildren();
  const isThinking = isWriting && !node.content && !node.tool_calls;
  if (!place.firstChild) place.append(disclosure("reasoning", "", make("div", { class: "inside", tabindex: "0" })));
  const [details] = place.children;
  const [summary, inside] = details.children;
  if (details.dataset.thinking !== String(isThinking)) details.open = isThinking; // opens and closes by itself once
  details.dataset.thinking = isThinking;
  const words = node.reasoning_content.trim().split(/\s+/).length;
  const time = node.thinking_s === undefined ? "" : `${node.thinking_s.toFixed(1)} s, `;
  summary.textContent = isThinking ? "Thinking…" : `Thought for ${time}${words} words`;
  inside.textContent = node.reasoning_content;
  if (isThinking) inside.scrollTop = inside.scrollHeight;
  return undefined;
}

// Calls that still want a result, of the last message that made some.
export function openCalls(chat) {
  const nodes = chat ? path(chat) : [];
  const at = nodes.findLastIndex((node) => node.tool_calls);
  if (at < 0 || isOpen(nodes[at])) return [];
  const given = new Set(nodes.slice(at + 1).map((node) => node.tool_call_id));
  return nodes[at].tool_calls.filter((call) => !given.has(call.id));
}

function fillCalls(place, chat, node, isWriting, act) {
  if (!node.tool_calls && !place.firstChild) return;
  const waiting = isWriting ? [] : openCalls(chat);
  place.replaceChildren(...(node.tool_calls ?? []).map((call) => {
    const details = disclosure("call", `Calls ${call.function.name}`, make("pre", { tabindex: "0" }, make("code", {}, pretty(call.function.arguments))));
    details.open = true;
    if (waiting.some(({ id }) => id === call.id)) details.append(resultForm(call, act));
    return details;
  }));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still on its way; shown as it is
  }
}

function resultForm(call, act) {
  const field = make("input", { "aria-label": `Result of ${call.function.name}`, placeholder: "Result of the call" });
  const give = () => act.giveResult(call, field.value);
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") give(); });
  return make("div", { class: "result" }, field, button("Give", give));
}

function footer(chat, node, act) {
  const row = make("div", { class: "actions" }, ...versions(chat, node, act));
  const copy = button("Copy", (source) => copyText(node.content, source));
  if (node.role === "user") {
    row.append(button("Edit", () => act.edit(node)), copy);
    return [row];
  }
  const isBroken = node.finish === "length" || node.finish === "stopped" || node.finish === "interrupted" || isLost(node) || node.error;
  if (node.error) row.append(button("Retry", () => act.retry(node)));
  else row.append(button("Regenerate", () => act.regenerate(node)));
  if (isBroken && node.content && !node.tool_calls) row.append(button("Continue", () => act.resume(node)));
  if (node.content) row.append(copy);
  row.append(make("span", { class: "note" }, note(node)));
  return node.error ? [make("div", { class: "failed", role: "alert" }, node.error), row] : [row];
}

const isLost = (node) => Boolean(node.writer) && !isOpen(node); // its tab died without a word

function versions(chat, node, act) {
  const all = children(chat, node.parent);
  if (all.length < 2) return [];
  const at = all.findIndex(({ id }) => id === node.id);
  const step = (by, label, sign) => button(sign, () => act.choose(all[at + by]), { "aria-label": label, disabled: !all[at + by] });
  return [make("span", { class: "versions" }, step(-1, "Version before", "‹"),
    make("span", { "aria-label": `Version ${at + 1} of ${all.length}` , role: "img" }, `${at + 1}/${all.length}`), step(1, "Version after", "›"))];
}

function note(node) {
  const { usage, finish } = node;
  const parts = [isLost(node) ? FINISH.interrupted : FINISH[finish]];
  if (usage) parts.push(`${usage.output} tokens`);
  if (usage?.rate > 0 && Number.isFinite(usage.rate)) parts.push(`${usage.rate.toFixed(1)}/s`, `first after ${usage.wait.toFixed(2)} s`);
  if (usage?.cached) parts.push(`${usage.cached} from the cache`);
  return parts.filter(Boolean).join(" · ");
}
