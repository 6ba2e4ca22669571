// Markdown to DOM nodes. Text from a model only ever becomes text nodes and known elements:
// there is no innerHTML here, and links go to web and mail addresses only.

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

export function render(text) {
  const root = make("div", { class: "md" });
  root.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return root;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|?(.+\|.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 6;

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) at = takeFence(lines, at, fence, found);
    else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      found.push(make(`h${marks.length}`, {}, ...inline(title)));
      at += 1;
    } else if (RULE.test(line)) {
      found.push(make("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < MAX_DEPTH) {
      const inner = [];
      while (at < lines.length && /^ {0,3}>/.test(lines[at])) inner.push(lines[at++].replace(/^ {0,3}> ?/, ""));
      found.push(make("blockquote", {}, ...blocks(inner, depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) at = takeList(lines, at, found, depth);
    else if (ROW.test(line) && DIVIDER.test(lines[at + 1] ?? "")) at = takeTable(lines, at, found);
    else at = takeParagraph(lines, at, found, depth);
  }
  return found;
}

function takeFence(lines, at, [, marks, language], found) {
  const inner = [];
  const end = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},}\\s*$`);
  for (at += 1; at < lines.length && !end.test(lines[at]); at += 1) inner.push(lines[at]);
  found.push(codeBlock(inner.join("\n"), language));
  return at + 1;
}

function takeList(lines, at, found, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const list = make(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(mark, 10) } : {});
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered || item[1].length < indent.length) break;
    const inner = [item[3]];
    for (at += 1; at < lines.length; at += 1) {
      const isDeeper = /^\s/.test(lines[at]) && lines[at].search(/\S/) > indent.length + 1;
      if (isDeeper) inner.push(lines[at].slice(Math.min(lines[at].search(/\S/), indent.length + mark.length + 1)));
      else if (!lines[at].trim() && /^\s+\S/.test(lines[at + 1] ?? "")) inner.push("");
      else break;
    }
    const parts = blocks(inner, depth + 1);
    // a single paragraph is the item itself
    const isTight = parts.length && parts[0].tagName === "P";
    list.append(make("li", {}, ...(isTight ? parts[0].childNodes : []), ...(isTight ? parts.slice(1) : parts)));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  found.push(list);
  return at;
}

function takeTable(lines, at, found) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const table = make("table");
  table.append(make("tr", {}, ...cells(lines[at]).map((cell) => make("th", {}, ...cell))));
  for (at += 2; at < lines.length && ROW.test(lines[at]); at += 1) {
    table.append(make("tr", {}, ...cells(lines[at]).map((cell) => make("td", {}, ...cell))));
  }
  found.push(table);
  return at;
}

function takeParagraph(lines, at, found, depth) {
  const inner = [];
  do inner.push(lines[at++]);
  while (
    at < lines.length && lines[at].trim() && !FENCE.test(lines[at]) && !HEADING.test(lines[at]) &&
    !RULE.test(lines[at]) && !(depth < MAX_DEPTH && (ITEM.test(lines[at]) || /^ {0,3}>/.test(lines[at])))
  );
  found.push(make("p", {}, ...inline(inner.join("\n"))));
  return at;
}

// Earlier alternatives win: code, then links, then emphasis.
const SPAN = /(`+)([\s\S]+?)\1(?!`)|\[([^\]\n]{1,500})\]\(([^()\s]{1,2000}(?:\([^()\s]*\))?)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])|\*\*([^*\n][\s\S]*?)\*\*|(?<!\w)__([^_\n][\s\S]*?)__(?!\w)|\*([^*\s][^*]*?)\*|(?<!\w)_([^_\s][^_]*?)_(?!\w)|~~([^~\n]+)~~| {2,}\n/;

function inline(text, depth = 0) {
  const found = [];
  while (text) {
    const match = depth < MAX_DEPTH ? SPAN.exec(text) : null;
    if (!match) {
      found.push(text);
      break;
    }
    if (match.index) found.push(text.slice(0, match.index));
    found.push(span(match, depth + 1));
    text = text.slice(match.index + match[0].length);
  }
  return found;
}

function span([whole, ticks, code, label, target, url, bold, bold2, italic, italic2, struck], depth) {
  if (ticks) return make("code", {}, code.replace(/^ (.+) $/s, "$1"));
  if (target) return link(target, inline(label, depth), whole);
  if (url) return link(url, [url], whole);
  if (bold || bold2) return make("strong", {}, ...inline(bold || bold2, depth));
  if (italic || italic2) return make("em", {}, ...inline(italic || italic2, depth));
  if (struck) return make("s", {}, ...inline(struck, depth));
  return make("br");
}

function link(target, children, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return document.createTextNode(whole);
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

export function codeBlock(code, language = "") {
  const copy = make("button", { type: "button", onclick: () => copyText(code, copy) }, "Copy");
  const top = make("div", { class: "bar-top" }, make("span", {}, language || "text"), copy);
  return make("div", { class: "block" }, top, make("pre", {}, make("code", {}, ...highlight(code, language))));
}

export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = before; }, 1200);
}

const WORDS = new Set(
  ("and as assert async await bool break case catch char class const continue def default del do double elif else enum " +
   "except export extends false finally float fn for from func function global if impl import in int interface is lambda " +
   "let long match mod mut new nil None not null or package pass private pub public raise return self static str string " +
   "struct super switch this throw trait true True False try type typeof undefined union unsafe use using var void where " +
   "while with yield SELECT FROM WHERE INSERT UPDATE DELETE JOIN ON GROUP BY ORDER LIMIT").split(" "),
);
const HASH = new Set(["python", "py", "bash", "sh", "shell", "yaml", "yml", "toml", "ruby", "perl", "r", "make", "dockerfile"]);
const MAX_HIGHLIGHT = 20000;

function highlight(code, language) {
  const name = language.toLowerCase();
  if (!name || name === "text" || name === "markdown" || code.length > MAX_HIGHLIGHT) return [code];
  const comment = HASH.has(name) ? "#[^\\n]*" : name === "sql" ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?\\*\\/";
  const pattern = new RegExp(`(${comment})|("(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\.)*\`)|\\b(\\d[\\w.]*)|\\b([A-Za-z_]\\w*)`, "g");
  const found = [];
  let last = 0;
  for (const match of code.matchAll(pattern)) {
    const [text, isComment, isString, isNumber, word] = match;
    const kind = isComment ? "c" : isString ? "s" : isNumber ? "n" : word && WORDS.has(word) ? "k" : "";
    if (!kind) continue;
    found.push(code.slice(last, match.index), make("span", { class: kind }, text));
    last = match.index + text.length;
  }
  found.push(code.slice(last));
  return found;
}
