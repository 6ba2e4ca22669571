// The chat page: what is shown now, what a click or a key does, answers on their way.

import { $, button, make, onFiles } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { Figures } from "./figures.js";
import { exportAll, initMenu } from "./menu.js";
import { changed as settingsChanged, chosenOptions, initSettings, settings } from "./settings.js";
import * as store from "./store.js";
import { requestBody, streamAnswer, takeDelta } from "./stream.js";
import { emptyNode, fill, messageNode, openCalls } from "./view.js";

const SAVE_MS = 700; // how often an answer on its way is kept
const MAX_FILE = 500_000;

let chat = null;
let editing = null; // the message whose copy is in the field
let files = []; // attached to what is being written
let model = "";
const runs = new Map(); // chat id: {controller, node}

const headers = () => (settings.key ? { authorization: `Bearer ${settings.key}` } : {});
const runOf = (item) => (item ? runs.get(item.id) : undefined);
const isBusy = () => Boolean(chat) && (runs.has(chat.id) || store.path(chat).some(store.isOpen));

// --- answers -----------------------------------------------------------------------------------

async function answer(here, node, isContinued = false) {
  const controller = new AbortController();
  const run = { controller, node };
  const begin = performance.now();
  let first = 0;
  runs.set(here.id, run);
  node.writer = store.tab;
  touch(here, node);
  const timer = setInterval(() => touch(here, node), SAVE_MS);
  draw();
  try {
    const nodes = ancestors(here, node);
    const body = requestBody(isContinued ? [...nodes, node] : nodes, chosenOptions(here));
    if (isContinued) body.continue_final_message = true;
    for await (const chunk of streamAnswer(body, headers(), controller.signal)) {
      if (chunk.usage) node.usage = { output: chunk.usage.completion_tokens, cached: chunk.usage.prompt_tokens_details?.cached_tokens };
      const choice = chunk.choices[0];
      if (!choice) continue;
      const isThinking = !node.content && !node.tool_calls;
      takeDelta(node, choice.delta);
      if (!first && (node.content || node.reasoning_content || node.tool_calls)) first = performance.now();
      if (isThinking && node.reasoning_content) node.thinking_s = (performance.now() - first) / 1000;
      node.finish = choice.finish_reason ?? node.finish;
      redraw(here, node);
    }
  } catch (error) {
    if (run.isLeft) node.finish = "interrupted";
    else if (error.name === "AbortError") node.finish = "stopped";
    else node.error = error.message;
  } finally {
    clearInterval(timer);
    const seconds = (performance.now() - first) / 1000;
    if (node.usage && first) Object.assign(node.usage, { rate: (node.usage.output - 1) / seconds, wait: (first - begin) / 1000 });
    finish(here, node);
    if (here === chat) focusNext();
  }
}

function finish(here, node) {
  runs.delete(here.id);
  delete node.writer;
  if (node.error || ["stopped", "length", "interrupted"].includes(node.finish)) delete node.tool_calls; // maybe cut in the middle
  touch(here, node);
  draw();
}

// Keeps a message as it now stands, unless another tab deleted its conversation.
function touch(here, node) {
  if (!store.chats.has(here.id)) return runs.get(here.id)?.controller.abort();
  node.changed = store.stamp();
  return store.save(here);
}

function ancestors(here, node) {
  const found = [];
  for (let at = here.nodes[node.parent]; at; at = here.nodes[at.parent]) found.unshift(at);
  return found;
}

const newAnswer = (here, parent) => answer(here, store.addNode(here, parent, { role: "assistant", content: "" }));

// Where the keyboard belongs: a call that waits for its result, or the next message.
function focusNext() {
  if (!document.querySelector("dialog[open]")) (document.querySelector(".result input") ?? $("input")).focus();
}

// --- acting ------------------------------------------------------------------------------------

const act = {
  send(text, attached = [], parent = chat && store.path(chat).at(-1)?.id) {
    if (!chat) {
      chat = store.newChat(text.trim() || attached[0].name, { ...settings.options });
      store.chats.set(chat.id, chat);
      store.write("dsv4.current", chat.id, sessionStorage);
      store.writeDraft(null, { text: "", files: [] });
    }
    const node = store.addNode(chat, parent, { role: "user", content: text, ...(attached.length ? { files: attached } : {}) });
    keepDraft();
    newAnswer(chat, node.id);
  },
  edit(node) {
    if (isBusy()) return;
    editing = node;
    setComposer(node.content, node.files ?? []);
  },
  regenerate(node) {
    if (!isBusy()) newAnswer(chat, node.parent);
  },
  retry(node) {
    if (isBusy()) return;
    if (node.content) return act.regenerate(node);
    for (const name of ["error", "finish", "reasoning_content", "tool_calls", "usage", "thinking_s"]) delete node[name];
    answer(chat, node);
  },
  resume(node) {
    if (isBusy()) return;
    delete node.error;
    delete node.finish;
    answer(chat, node, true);
  },
  choose(node) {
    if (!node || isBusy()) return;
    chat.chosen[node.parent] = node.id;
    store.save(chat);
    draw();
  },
  giveResult(call, text) {
    const node = store.addNode(chat, store.path(chat).at(-1).id, { role: "tool", tool_call_id: call.id, content: text });
    store.save(chat);
    if (!openCalls(chat).length) return newAnswer(chat, node.id);
    draw();
    return focusNext();
  },
};

function select(item) {
  keepDraft();
  show(item);
}

function show(item) {
  editing = null;
  chat = item;
  store.write("dsv4.current", chat?.id ?? null, sessionStorage);
  const draft = store.readDraft(chat?.id);
  setComposer(draft.text, draft.files);
  draw();
  toEnd();
  toggleSide(false);
}

function remove(...some) {
  for (const item of some) {
    runOf(item)?.controller.abort();
    store.remove(item);
  }
  if (some.includes(chat)) show(null);
  else draw();
  tell(some.length === 1 ? `Deleted “${some[0].title}”.` : `Deleted ${some.length} conversations.`, "Undo", () => {
    some.forEach(store.save);
    if (some.length === 1) select(some[0]);
    else draw();
  });
}

function rename(title) {
  if (!title.trim() || !chat) return draw();
  Object.assign(chat, { title: title.trim().slice(0, 200), changed: store.stamp() });
  store.save(chat);
  return draw();
}

async function attach(list) {
  for (const file of list) {
    try {
      if (file.size > MAX_FILE) throw new Error(`found ${file.size} bytes, expected at most ${MAX_FILE}`);
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("binary");
      files = [...files, { name: file.name, text }];
    } catch (error) {
      tell(`${file.name} is not attached: ${error instanceof TypeError ? "it is no text in UTF-8" : error.message}.`);
    }
  }
  drawFiles();
  keepDraft();
}

// --- the field ---------------------------------------------------------------------------------

function setComposer(text, attached) {
  $("input").value = text;
  files = attached;
  $("editing").hidden = !editing;
  drawFiles();
  resize();
  $("input").focus();
}

function sendField() {
  const text = $("input").value;
  const attached = files;
  if (isBusy() || !(text.trim() || attached.length)) return;
  const parent = editing?.parent;
  if (editing) cancelEdit(); // what was being written before comes back
  else setComposer("", []);
  act.send(text, attached, parent);
}

function cancelEdit() {
  editing = null;
  const draft = store.readDraft(chat?.id);
  setComposer(draft.text, draft.files);
}

function keepDraft() {
  if (!editing) store.writeDraft(chat?.id, { text: $("input").value, files });
}

function resize() {
  const field = $("input");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function drawFiles() {
  $("files").replaceChildren(...files.map((file) => make("span", { class: "chip" }, file.name,
    button("✕", () => { files = files.filter((other) => other !== file); drawFiles(); keepDraft(); }, { "aria-label": `Remove ${file.name}` }))));
}

// --- showing -----------------------------------------------------------------------------------

const shown = new Map(); // node id: article of the conversation shown
let shownChat = null;

function draw() {
  const isNearEnd = atEnd();
  if (shownChat !== chat) shown.clear();
  shownChat = chat;
  const nodes = chat ? store.path(chat) : [];
  const articles = nodes.map((node) => {
    const old = shown.get(node.id);
    if (old) fill(old, chat, node, act);
    else shown.set(node.id, messageNode(chat, node, act));
    return shown.get(node.id);
  });
  const wanted = articles.length ? articles : [emptyNode(EXAMPLES[model] ?? EXAMPLES[""], act)];
  const now = [...$("log").children];
  if (now.length !== wanted.length || now.some((node, at) => node !== wanted[at])) $("log").replaceChildren(...wanted);
  const isRunning = isBusy();
  $("title").textContent = chat?.title ?? "New chat";
  document.title = chat ? `${chat.title} · dsv4` : "dsv4";
  $("log").setAttribute("aria-busy", String(isRunning));
  $("send").textContent = isRunning ? "Stop" : "Send";
  $("send").type = isRunning ? "button" : "submit";
  const { mode } = chosenOptions(chat);
  $("mode").setAttribute("aria-pressed", String(mode !== "none"));
  $("mode").textContent = `Thinking: ${{ none: "off", high: "on" }[mode] ?? mode}`;
  for (const node of document.querySelectorAll("[data-needs-chat]")) node.disabled = !chat;
  drawList();
  if (isNearEnd || runOf(chat)) toEnd();
}

let frame = 0;
function redraw(here, node) {
  if (here !== chat || frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    const article = shown.get(node.id);
    if (here !== chat || !article || !node.writer) return;
    const isNearEnd = atEnd();
    fill(article, here, node, act);
    if (isNearEnd) toEnd();
  });
}

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const toEnd = () => { $("log").scrollTop = $("log").scrollHeight; };

function drawList() {
  const wanted = $("search").value.trim().toLowerCase();
  const hit = (item) => !wanted || item.title.toLowerCase().includes(wanted)
    || Object.values(item.nodes).some((node) => node.content.toLowerCase().includes(wanted));
  const entries = store.listed().filter(hit).map((item) => make("div", { class: "entry" },
    button(item.title, () => select(item), { class: "open", title: item.title, "aria-current": item === chat ? "true" : null }),
    runs.has(item.id) ? make("span", { class: "busy" }, "writing") : null,
    button("✕", () => remove(item), { class: "remove", "aria-label": `Delete ${item.title}` })));
  $("list").replaceChildren(...(entries.length ? entries : [make("p", {}, wanted ? "Nothing found." : "No conversations yet.")]));
}

let toastTimer = 0;
function tell(text, label = "", undo = null) {
  clearTimeout(toastTimer);
  const hide = () => $("toast").replaceChildren();
  const parts = [make("span", {}, text), button("✕", hide, { "aria-label": "Close this note" })];
  if (undo) parts.splice(1, 0, button(label, () => { hide(); undo(); }));
  $("toast").replaceChildren(...parts);
  toastTimer = setTimeout(hide, undo ? 15000 : 8000);
}

function toggleSide(isOpen) {
  $("side").classList.toggle("open", isOpen);
  $("veil").hidden = !isOpen;
  $("menu").setAttribute("aria-expanded", String(isOpen));
}

// --- events ------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (openCalls(chat).length && !editing) {
    tell("Give the call its result first.");
    focusNext();
  } else sendField();
});
$("send").addEventListener("click", () => {
  if (runOf(chat)) runOf(chat).controller.abort();
  else if (isBusy()) tell("Another tab writes this answer; stop it there.");
});
$("input").addEventListener("input", () => { resize(); keepDraft(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("input").value && chat && !isBusy()) {
    const last = store.path(chat).findLast((node) => node.role === "user");
    if (!last) return;
    event.preventDefault();
    act.edit(last);
  }
});
$("cancel-edit").addEventListener("click", cancelEdit);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) {
    if ($("more").open) $("more").open = false;
    else if (editing) cancelEdit();
    else if (runOf(chat)) runOf(chat).controller.abort();
    else toggleSide(false);
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    select(null);
  } else if (event.key === "/" && document.activeElement === document.body) {
    event.preventDefault();
    $("input").focus();
  }
});
$("new").addEventListener("click", () => select(null));
$("search").addEventListener("input", drawList);
$("menu").addEventListener("click", () => toggleSide(!$("side").classList.contains("open")));
$("veil").addEventListener("click", () => toggleSide(false));
onFiles("attach-file", attach);
$("attach").addEventListener("click", () => $("attach-file").click());
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
$("input").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});

// An answer cannot outlive its page: it is kept as far as it came.
addEventListener("pagehide", () => {
  keepDraft();
  for (const [id, run] of runs) {
    run.isLeft = true;
    run.node.finish = "interrupted";
    finish(store.chats.get(id), run.node);
    run.controller.abort();
  }
});

initSettings(() => chat, draw);
initMenu({ getChat: () => chat, select, remove, rename, tell });
store.open((name) => {
  if (name === "dsv4.settings") settingsChanged();
  for (const [id, run] of runs) if (!store.chats.has(id)) run.controller.abort();
  if (chat && !store.chats.has(chat.id)) show(null);
  else if (name === `dsv4.draft.${chat?.id ?? "new"}` && !document.hasFocus() && !editing) cancelEdit();
  draw();
}, () => tell("This browser has no room left for conversations. Export some, then delete them.", "Export all", exportAll));
show(store.chats.get(store.read("dsv4.current", null, sessionStorage)) ?? null);
setInterval(() => { if (chat && !runOf(chat) && store.path(chat).some((node) => node.writer)) draw(); }, 2000);

new Figures($("figures"), headers, (state, name) => {
  if (state !== null && state !== $("state").textContent) $("state").textContent = state;
  if (!name || name === model) return;
  model = name;
  $("model").textContent = name;
  if (!chat) draw();
});
