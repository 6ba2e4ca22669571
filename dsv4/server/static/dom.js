// Small helpers: elements, copying, saving a file.

export const $ = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function button(label, act, attributes = {}) {
  const node = make("button", { type: "button", onclick: () => act(node), ...attributes }, label);
  return node;
}

// navigator.clipboard exists on HTTPS and localhost only; elsewhere the old command does it.
export async function copyText(text, source) {
  const before = source.textContent;
  let isCopied = true;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else isCopied = copyBySelection(text);
  } catch {
    isCopied = copyBySelection(text);
  }
  source.textContent = isCopied ? "Copied" : "Not allowed";
  setTimeout(() => { source.textContent = before; }, 1200);
}

function copyBySelection(text) {
  const field = make("textarea", { class: "offscreen", "aria-hidden": "true" });
  field.value = text;
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}

export function saveFile(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export function onFiles(id, work) {
  $(id).addEventListener("change", () => { work([...$(id).files]); $(id).value = ""; });
}
