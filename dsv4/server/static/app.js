// The chat page: conversations in localStorage, answers streamed from /v1/chat/completions.

import { Figures } from "./figures.js";
import { codeBlock, copyText, make, render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const DEFAULTS = { mode: "high", temperature: "", top_p: "", max_tokens: "", system: "", tools: "", key: "", theme: "auto" };
const EXAMPLES = ["What is the capital of France?", "What is 12 plus 30?", "Tell me a short story."];

// --- what is kept ------------------------------------------------------------------------------

function load(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`dsv4.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(`dsv4.${name}`, JSON.stringify(value));
  } catch {
    say("the browser keeps no more; delete a conversation");
  }
}

const settings = { ...DEFAULTS, ...load("settings", {}) };
let chats = load("chats", []); // newest first: {id, title, messages}
let chat = chats.find((item) => item.id === load("current", null)) ?? null;
let running = null; // {controller, chat} while an answer streams

function keep() {
  store("chats", chats);
  store("current", chat?.id ?? null);
}

// --- talking to the server ---------------------------------------------------------------------

const headers = () => (settings.key ? { authorization: `Bearer ${settings.key}` } : {});

function requestBody(messages) {
  const sent = messages.filter((message) => !message.error).map(({ role, content, reasoning_content, tool_calls, tool_call_id }) =>
    JSON.parse(JSON.stringify({ role, content, reasoning_content, tool_calls, tool_call_id })));
  const body = { messages: sent, stream: true, stream_options: { include_usage: true }, reasoning_effort: settings.mode };
  if (settings.system.trim()) body.messages = [{ role: "system", content: settings.system }, ...body.messages];
  for (const name of ["temperature", "top_p", "max_tokens"]) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
    if (done) throw new Error("the server broke off");
  }
}

async function answer() {
  const here = chat;
  const message = { role: "assistant", content: "", reasoning_content: "", is_open: true };
  const controller = new AbortController();
  running = { controller, chat: here };
  const begin = performance.now();
  let first = 0;
  try {
    const body = JSON.stringify(requestBody(here.messages));
    here.messages.push(message);
    draw();
    const response = await fetch("/v1/chat/completions", {
      method: "POST", body, signal: controller.signal, headers: { "content-type": "application/json", ...headers() },
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) message.usage = { output: chunk.usage.completion_tokens, cached: chunk.usage.prompt_tokens_details.cached_tokens };
      const choice = chunk.choices[0];
      if (choice) {
        if (!first && (choice.delta.content || choice.delta.reasoning_content || choice.delta.tool_calls)) first = performance.now();
        takeDelta(message, choice.delta);
        message.finish = choice.finish_reason ?? message.finish;
        redraw(here, message);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = error.message;
  } finally {
    delete message.is_open;
    if (message.finish === "stopped" || message.finish === "length") delete message.tool_calls; // maybe cut in the middle
    const seconds = (performance.now() - first) / 1000;
    if (message.usage && first) Object.assign(message.usage, { rate: (message.usage.output - 1) / seconds, wait: (first - begin) / 1000 });
    if (!message.reasoning_content) delete message.reasoning_content;
    running = null;
    keep();
    draw();
    focusNext();
  }
}

// Where the keyboard belongs: a call that waits for its result, or the next message.
function focusNext() {
  (document.querySelector(".result input") ?? $("input")).focus();
}

function takeDelta(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning_content += delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[piece.index] ??= { id: piece.id, type: "function", function: { name: piece.function.name, arguments: "" } });
    call.function.arguments += piece.function.arguments ?? "";
  }
}

// --- acting ------------------------------------------------------------------------------------

function send(text) {
  if (running || !text.trim()) return;
  if (!chat) {
    chat = { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, title: text.trim().slice(0, 60), messages: [] };
    chats = [chat, ...chats];
  }
  chat.messages.push({ role: "user", content: text });
  keep();
  answer();
}

function stop() {
  running?.controller.abort();
}

function regenerate(at) {
  if (running) return;
  chat.messages = chat.messages.slice(0, at);
  answer();
}

function edit(at) {
  if (running) return;
  $("input").value = chat.messages[at].content;
  chat.messages = chat.messages.slice(0, at);
  if (!chat.messages.length) {
    chats = chats.filter((item) => item !== chat);
    chat = null;
  }
  keep();
  draw();
  resize();
  $("input").focus();
}

function giveResult(call, text) {
  chat.messages.push({ role: "tool", tool_call_id: call.id, content: text });
  keep();
  if (!openCalls().length) return answer();
  draw();
  focusNext();
}

function openCalls() {
  const at = chat ? chat.messages.findLastIndex((message) => message.tool_calls) : -1;
  if (at < 0) return [];
  const after = chat.messages.slice(at + 1);
  return chat.messages[at].tool_calls.filter((call) => !after.some((message) => message.tool_call_id === call.id));
}

function select(item) {
  if (running) stop();
  chat = item;
  keep();
  draw();
  toggleSide(false);
  $("input").focus();
}

function remove(item) {
  if (running?.chat === item) stop();
  chats = chats.filter((other) => other !== item);
  if (chat === item) chat = null;
  keep();
  draw();
}

// --- showing -----------------------------------------------------------------------------------

function draw() {
  const isNearEnd = atEnd();
  $("title").textContent = chat?.title ?? "New chat";
  $("log").replaceChildren(...(chat?.messages.length ? chat.messages.map(messageNode) : [emptyNode()]));
  $("log").setAttribute("aria-busy", String(Boolean(running)));
  $("send").textContent = running ? "Stop" : "Send";
  $("send").type = running ? "button" : "submit";
  $("mode").setAttribute("aria-pressed", String(settings.mode !== "none"));
  drawList();
  if (isNearEnd || running) toEnd();
}

let frame = 0;
function redraw(here, message) {
  if (here !== chat || frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    if (here !== chat || !message.is_open) return;
    const isNearEnd = atEnd();
    const old = $("log").lastElementChild;
    const node = messageNode(message, here.messages.length - 1);
    const wasOpen = old?.querySelector("details.reasoning")?.open;
    const fresh = node.querySelector("details.reasoning");
    if (fresh && wasOpen !== undefined) fresh.open = wasOpen;
    old?.replaceWith(node);
    const inside = node.querySelector("details.reasoning .inside");
    if (inside) inside.scrollTop = inside.scrollHeight;
    if (isNearEnd) toEnd();
  });
}

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const toEnd = () => { $("log").scrollTop = $("log").scrollHeight; };

function emptyNode() {
  const examples = EXAMPLES.map((text) => make("button", { type: "button", onclick: () => send(text) }, text));
  return make("div", { class: "empty" }, make("h2", {}, "Ask something"),
    make("div", {}, "Conversations stay in this browser."), make("div", { class: "examples" }, ...examples));
}

function messageNode(message, at) {
  if (message.role === "tool") return toolNode(message);
  const node = make("article", { class: `message ${message.role}` }, make("span", { class: "who" }, message.role === "user" ? "You said:" : "Answer:"));
  if (message.role === "user") {
    node.append(make("div", { class: "text" }, message.content));
    node.append(actions(["Edit", () => edit(at)], ["Copy", (button) => copyText(message.content, button)]));
    return node;
  }
  if (message.reasoning_content) node.append(reasoningNode(message));
  if (message.content) node.append(render(message.content));
  const isWaiting = message.is_open && !message.content;
  if (isWaiting && !message.reasoning_content) node.append(make("div", { class: "cursor", "aria-label": "waiting" }));
  else if (message.is_open && message.content) (node.lastChild.lastElementChild ?? node.lastChild).classList.add("cursor");
  for (const call of message.tool_calls ?? []) node.append(callNode(call, message));
  if (message.error) node.append(make("div", { class: "failed", role: "alert" }, message.error));
  if (!message.is_open) {
    const row = actions(["Regenerate", () => regenerate(at)], ["Copy", (button) => copyText(message.content, button)]);
    row.append(make("span", { class: "note" }, note(message)));
    node.append(row);
  }
  return node;
}

function note({ usage, finish }) {
  const parts = [];
  if (finish === "length") parts.push("cut at the limit");
  if (finish === "stopped") parts.push("stopped");
  if (usage) parts.push(`${usage.output} tokens`);
  if (usage?.rate > 0 && Number.isFinite(usage.rate)) parts.push(`${usage.rate.toFixed(1)}/s`, `first after ${usage.wait.toFixed(2)} s`);
  if (usage?.cached) parts.push(`${usage.cached} from the cache`);
  return parts.join(" · ");
}

function reasoningNode(message) {
  const isThinking = message.is_open && !message.content && !message.tool_calls;
  const count = message.reasoning_content.trim().split(/\s+/).length;
  const title = isThinking ? "Thinking…" : `Thought for ${count} words`;
  return make("details", { class: "reasoning", open: isThinking }, make("summary", {}, title), make("div", { class: "inside" }, message.reasoning_content));
}

function callNode(call, message) {
  let text = call.function.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // still on its way; shown as it is
  }
  const node = make("details", { class: "call", open: true }, make("summary", {}, `Calls ${call.function.name}`), make("pre", {}, make("code", {}, text)));
  if (!message.is_open && openCalls().includes(call)) {
    const field = make("input", { "aria-label": `Result of ${call.function.name}`, placeholder: "Result of the call" });
    const give = () => giveResult(call, field.value);
    field.addEventListener("keydown", (event) => { if (event.key === "Enter") give(); });
    node.append(make("div", { class: "result" }, field, make("button", { type: "button", onclick: give }, "Give")));
  }
  return node;
}

function toolNode(message) {
  return make("details", { class: "call" }, make("summary", {}, "Result given"), make("div", { class: "inside" }, message.content));
}

function actions(...items) {
  const buttons = items.map(([name, act]) => {
    const button = make("button", { type: "button", onclick: () => act(button) }, name);
    return button;
  });
  return make("div", { class: "actions" }, ...buttons);
}

function drawList() {
  const entries = chats.map((item) =>
    make("div", { class: "entry", "aria-current": String(item === chat) },
      make("button", { class: "open", type: "button", title: item.title, onclick: () => select(item) }, item.title),
      make("button", { class: "remove", type: "button", "aria-label": `Delete ${item.title}`, onclick: () => remove(item) }, "✕")));
  $("list").replaceChildren(...(entries.length ? entries : [make("p", {}, "No conversations yet.")]));
}

function say(text) {
  $("state").textContent = text;
}

function resize() {
  const field = $("input");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function toggleSide(isOpen) {
  $("side").classList.toggle("open", isOpen);
  $("veil").hidden = !isOpen;
  $("menu").setAttribute("aria-expanded", String(isOpen));
}

const dark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  const isDark = settings.theme === "auto" ? dark.matches : settings.theme === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const names = { auto: "automatic", light: "light", dark: "dark" };
  $("theme").setAttribute("aria-label", `Colours: ${names[settings.theme]}`);
}

// --- settings ----------------------------------------------------------------------------------

const form = $("settings").querySelector("form");

function openSettings() {
  for (const name of Object.keys(DEFAULTS)) if (form.elements[name]) form.elements[name].value = settings[name];
  $("settings-error").textContent = "";
  $("settings").showModal();
}

form.addEventListener("submit", (event) => {
  try {
    if (form.elements.tools.value.trim() && !Array.isArray(JSON.parse(form.elements.tools.value))) throw new Error("expected a list");
  } catch (error) {
    event.preventDefault();
    $("settings-error").textContent = `Tools: ${error.message}`;
    return;
  }
  for (const name of Object.keys(DEFAULTS)) if (form.elements[name]) settings[name] = form.elements[name].value;
  store("settings", settings);
  draw();
});

$("forget").addEventListener("click", () => {
  stop();
  chats = [];
  chat = null;
  keep();
  draw();
  $("settings").close();
});

// --- events ------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  if (openCalls().length) {
    say("first give the call its result");
    focusNext();
    return;
  }
  const text = $("input").value;
  $("input").value = "";
  resize();
  send(text);
});
$("send").addEventListener("click", () => { if (running) stop(); });
$("input").addEventListener("input", resize);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("input").value && chat && !running) {
    const at = chat.messages.findLastIndex((message) => message.role === "user");
    if (at >= 0) {
      event.preventDefault();
      edit(at);
    }
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) stop();
  else if (event.key === "Escape") toggleSide(false);
  else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    select(null);
  } else if (event.key === "/" && document.activeElement === document.body) {
    event.preventDefault();
    $("input").focus();
  }
});
$("new").addEventListener("click", () => select(null));
$("menu").addEventListener("click", () => toggleSide(!$("side").classList.contains("open")));
$("veil").addEventListener("click", () => toggleSide(false));
$("options").addEventListener("click", openSettings);
$("mode").addEventListener("click", () => {
  settings.mode = settings.mode === "none" ? "high" : "none";
  store("settings", settings);
  draw();
});
$("theme").addEventListener("click", () => {
  settings.theme = { auto: "light", light: "dark", dark: "auto" }[settings.theme] ?? "auto";
  store("settings", settings);
  applyTheme();
});
dark.addEventListener("change", applyTheme);

applyTheme();
draw();
toEnd();
new Figures($("figures"), headers, (state, model) => {
  if (state !== null) say(state);
  if (model) $("model").textContent = model;
});
