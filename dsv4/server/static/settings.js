// Settings: the key and the colours belong to the browser, everything else to a conversation.

import { $ } from "./dom.js";
import { read, save, stamp, write } from "./store.js";

const OPTIONS = {
  mode: "high", system: "", tools: "", temperature: "", top_p: "", top_k: "", min_p: "", seed: "",
  presence_penalty: "", frequency_penalty: "", repetition_penalty: "", max_tokens: "",
};
const THEMES = { auto: "automatic", light: "light", dark: "dark" };

export const settings = { key: "", theme: "auto", options: {} };
const dark = matchMedia("(prefers-color-scheme: dark)");
const form = $("settings").querySelector("form");
let getChat = () => null;
let onChange = () => {};

export const chosenOptions = (chat) => ({ ...OPTIONS, ...(chat ? chat.options : settings.options) });

export function changed() {
  Object.assign(settings, read("dsv4.settings", {}));
  applyTheme();
}

function applyTheme() {
  const isDark = settings.theme === "auto" ? dark.matches : settings.theme === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[settings.theme] ?? "automatic"}`);
}

function setOptions(options, isDefault) {
  const chat = getChat();
  if (chat) {
    Object.assign(chat, { options, changed: stamp() });
    save(chat);
  }
  if (!chat || isDefault) settings.options = options;
  write("dsv4.settings", settings);
  onChange();
}

function openDialog() {
  const values = { ...chosenOptions(getChat()), key: settings.key };
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
  form.elements.everywhere.checked = false;
  $("settings-scope").textContent = getChat() ? "For this conversation." : "For new conversations.";
  $("everywhere").hidden = !getChat();
  $("settings-error").textContent = "";
  $("settings").showModal();
}

function submit(event) {
  try {
    const tools = form.elements.tools.value.trim();
    if (tools && !Array.isArray(JSON.parse(tools))) throw new Error("found something else, expected a list");
  } catch (error) {
    event.preventDefault();
    $("settings-error").textContent = `Tools: ${error.message}`;
    form.elements.tools.focus();
    return;
  }
  settings.key = form.elements.key.value;
  const options = {};
  for (const [name, fallback] of Object.entries(OPTIONS)) {
    if (form.elements[name].value !== fallback) options[name] = form.elements[name].value;
  }
  setOptions(options, form.elements.everywhere.checked);
}

export function initSettings(currentChat, redraw) {
  getChat = currentChat;
  onChange = redraw;
  form.addEventListener("submit", submit);
  $("settings-close").addEventListener("click", () => $("settings").close());
  $("options").addEventListener("click", openDialog);
  $("mode").addEventListener("click", () => {
    const options = chosenOptions(getChat());
    setOptions({ ...options, mode: options.mode === "none" ? "high" : "none" }, false);
  });
  $("theme").addEventListener("click", () => {
    settings.theme = { auto: "light", light: "dark", dark: "auto" }[settings.theme] ?? "auto";
    write("dsv4.settings", settings);
    applyTheme();
  });
  dark.addEventListener("change", applyTheme);
  changed();
}
