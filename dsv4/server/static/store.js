// Conversations in localStorage, one key each, so that two tabs never overwrite each other's.
//
// A conversation is a tree of messages: an edited question or a regenerated answer is a sibling, so
// nothing is replaced and two versions of a conversation merge by taking the union of their nodes.
//   chat: {id, title, changed, options, nodes: {id: node}, chosen: {parent id: child id}}
//   node: {id, parent, created, changed, role, content, …}

const CHAT = "dsv4.chat.";
const DRAFT = "dsv4.draft.";
const ROLES = new Set(["user", "assistant", "tool"]);
const OPEN_MS = 10000; // an unfinished answer that has not been saved for so long has no writer any more

export const tab = newId();
export const chats = new Map();
const written = new Map(); // chat id: the text under its key, as this tab last saw it
let onFull = () => {};

export function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
}

let lastStamp = 0;
export function stamp() {
  lastStamp = Math.max(lastStamp + 1, Date.now());
  return lastStamp;
}

// --- values ------------------------------------------------------------------------------------

export function read(name, fallback, area = localStorage) {
  try {
    return JSON.parse(area.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function write(name, value, area = localStorage) {
  try {
    area.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    onFull();
    return false;
  }
}

export const readDraft = (id) => read(DRAFT + (id ?? "new"), { text: "", files: [] });

export function writeDraft(id, draft) {
  const name = DRAFT + (id ?? "new");
  if (draft.text || draft.files.length) write(name, draft);
  else localStorage.removeItem(name);
}

// --- conversations -----------------------------------------------------------------------------

export function open(onChange, whenFull) {
  onFull = whenFull;
  for (const name of Object.keys(localStorage)) if (name.startsWith(CHAT)) take(name, localStorage.getItem(name));
  takeOldList();
  addEventListener("storage", (event) => {
    if (event.key === null) chats.clear();
    else if (event.key.startsWith(CHAT) && event.newValue === null) chats.delete(event.key.slice(CHAT.length));
    else if (event.key.startsWith(CHAT)) take(event.key, event.newValue);
    onChange(event.key ?? "");
  });
}

function take(name, text) {
  let found;
  try {
    found = checkChat(JSON.parse(text));
  } catch {
    return; // not ours, or damaged: left where it is
  }
  written.set(found.id, text);
  const mine = chats.get(found.id);
  if (mine) merge(mine, found, true);
  else chats.set(found.id, found);
}

// Earlier pages kept one list of plain messages.
function takeOldList() {
  for (const old of read("dsv4.chats", [])) save(fromMessages(old.messages, old.title));
  localStorage.removeItem("dsv4.chats");
}

export function merge(mine, other, preferOther) {
  for (const [id, node] of Object.entries(other.nodes)) {
    if (!mine.nodes[id]) mine.nodes[id] = node;
    else if (node.changed > mine.nodes[id].changed) Object.assign(clear(mine.nodes[id]), node);
  }
  if (other.changed > mine.changed) Object.assign(mine, { title: other.title, options: other.options, changed: other.changed });
  mine.chosen = preferOther ? { ...mine.chosen, ...other.chosen } : { ...other.chosen, ...mine.chosen };
}

function clear(node) {
  for (const key of Object.keys(node)) delete node[key];
  return node;
}

export function save(chat) {
  const stored = localStorage.getItem(CHAT + chat.id);
  if (stored !== null && stored !== written.get(chat.id)) merge(chat, JSON.parse(stored), false);
  chats.set(chat.id, chat);
  if (write(CHAT + chat.id, chat)) written.set(chat.id, localStorage.getItem(CHAT + chat.id));
}

export function remove(chat) {
  chats.delete(chat.id);
  written.delete(chat.id);
  localStorage.removeItem(CHAT + chat.id);
}

export const newest = (chat) => Math.max(chat.changed, ...Object.values(chat.nodes).map((node) => node.created));
export const listed = () => [...chats.values()].sort((a, b) => newest(b) - newest(a));

export function newChat(title, options) {
  return { id: newId(), title: title.trim().replace(/\s+/g, " ").slice(0, 60) || "Untitled", changed: stamp(), options, nodes: {}, chosen: {} };
}

export function addNode(chat, parent, fields) {
  const now = stamp();
  const node = { id: newId(), parent: parent ?? "", created: now, changed: now, ...fields };
  chat.nodes[node.id] = node;
  chat.chosen[node.parent] = node.id;
  return node;
}

export function children(chat, parent) {
  return Object.values(chat.nodes).filter((node) => node.parent === parent).sort((a, b) => a.created - b.created);
}

// The messages on the chosen way from the beginning to the end.
export function path(chat) {
  const found = [];
  for (let at = ""; ; ) {
    const next = children(chat, at);
    if (!next.length || found.length > 10000) return found;
    const node = next.find(({ id }) => id === chat.chosen[at]) ?? next.at(-1);
    found.push(node);
    at = node.id;
  }
}

// Whether somebody is still writing this answer: this tab, or another one not long ago.
export const isOpen = (node) => Boolean(node.writer) && (node.writer === tab || Date.now() - node.changed < OPEN_MS);

// --- other forms -------------------------------------------------------------------------------

export function fromMessages(messages, title) {
  const chat = newChat(title ?? messages.find(({ role }) => role === "user")?.content ?? "", {});
  const system = messages.find(({ role }) => role === "system");
  if (system) chat.options.system = String(system.content);
  let parent = "";
  for (const { role, content, reasoning_content, tool_calls, tool_call_id, finish } of messages) {
    if (!ROLES.has(role)) continue;
    const fields = JSON.parse(JSON.stringify({ role, content: content ?? "", reasoning_content, tool_calls, tool_call_id, finish }));
    parent = addNode(chat, parent, fields).id;
  }
  return checkChat(chat);
}

function checkChat(chat) {
  const isText = (value) => typeof value === "string";
  const isGood = isText(chat?.id) && isText(chat.title) && chat.nodes && chat.chosen && Object.entries(chat.nodes).every(
    ([id, node]) => node.id === id && isText(node.parent) && isText(node.content) && ROLES.has(node.role) && node.created > 0);
  if (!isGood) throw new Error("this is no conversation of dsv4");
  chat.options ??= {};
  chat.changed ||= 1;
  return chat;
}

export const toJson = (some) => JSON.stringify({ format: "dsv4 conversations", version: 1, chats: some }, null, 1);

export function importJson(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("the file holds no JSON");
  }
  const messages = Array.isArray(value) ? value : value?.messages;
  if (!Array.isArray(messages) && !Array.isArray(value?.chats)) throw new Error("found neither conversations of dsv4 nor a list of messages");
  const found = Array.isArray(messages) ? [fromMessages(messages)] : value.chats.map(checkChat);
  for (const chat of found) {
    if (chats.has(chat.id)) merge(chats.get(chat.id), chat, true);
    save(chats.get(chat.id) ?? chat);
  }
  return found;
}

export function toMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  if (chat.options.system) parts.push(`> ${chat.options.system.replaceAll("\n", "\n> ")}`);
  for (const node of path(chat)) {
    parts.push(`## ${{ user: "You", assistant: "Answer", tool: "Result of a call" }[node.role]}`);
    for (const file of node.files ?? []) parts.push(fenced(file.text, "", `${file.name}:`));
    if (node.reasoning_content) parts.push(`<details><summary>Thinking</summary>\n\n${node.reasoning_content}\n\n</details>`);
    if (node.content) parts.push(node.content);
    for (const call of node.tool_calls ?? []) parts.push(fenced(call.function.arguments, "json", `Call of \`${call.function.name}\`:`));
  }
  return `${parts.join("\n\n")}\n`;
}

export function fenced(text, language = "", title = "") {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length));
  const marks = "`".repeat(longest + 1);
  return `${title}\n${marks}${language}\n${text.replace(/\n$/, "")}\n${marks}`.trimStart();
}
