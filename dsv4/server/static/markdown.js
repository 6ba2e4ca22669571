// Markdown to DOM nodes: markdown-it parses, this file builds. Text from a model only becomes text
// nodes and the elements named here; there is no innerHTML.

import { button, copyText, make } from "./dom.js";
import { mathNode, mathPlugin } from "./math.js";
import hljs from "./vendor/highlight.js-11.12.0/highlight.min.js";
import MarkdownIt from "./vendor/markdown-it-15.0.3/markdown-it.esm.min.mjs";

const ELEMENTS = new Set("h1 h2 h3 h4 h5 h6 p ul ol li blockquote table thead tbody tr th td strong em s a".split(" "));
const MAX_HIGHLIGHT = 40000;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;

const md = new MarkdownIt({ html: false, linkify: true }).use(mathPlugin);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
md.validateLink = (url) => /^(https?:\/\/|mailto:)/i.test(url);

// Blocks whose source did not change keep their nodes, so a long answer streams in short steps and
// what is selected or scrolled stays so.
const sources = new WeakMap();

export function render(text, root = make("div", { class: "md" })) {
  const source = protectPipes(text.replace(/\r\n?/g, "\n"));
  const lines = source.split("\n");
  const environment = {};
  let count = 0;
  for (const tokens of topLevel(md.parse(source, environment))) {
    const [begin, end] = tokens[0].map;
    const key = JSON.stringify(environment.references ?? "") + lines.slice(begin, end).join("\n");
    const old = root.childNodes[count];
    if (!old || sources.get(old) !== key) {
      const node = build(tokens, document.createDocumentFragment()).firstChild;
      sources.set(node, key);
      if (old) old.replaceWith(node);
      else root.append(node);
    }
    count += 1;
  }
  while (root.childNodes.length > count) root.lastChild.remove();
  return root;
}

function* topLevel(tokens) {
  let begin = 0;
  for (let at = 0; at < tokens.length; at += 1) {
    if (tokens[at].level || tokens[at].nesting > 0) continue;
    yield tokens.slice(begin, at + 1);
    begin = at + 1;
  }
}

// A pipe inside code inside a table row belongs to the code, as authors mean it.
function protectPipes(text) {
  let fence = "";
  return text.split("\n").map((line) => {
    const marks = FENCE.exec(line)?.[1];
    if (marks && !fence) fence = marks;
    else if (marks && marks.startsWith(fence)) fence = "";
    if (fence || !/^\s*\|.*`.*\|/.test(line)) return line;
    return line.replace(/(`+)(.+?)\1/g, (code) => code.replace(/(?<!\\)\|/g, "\\|"));
  }).join("\n");
}

function build(tokens, root) {
  const stack = [root];
  const put = (node) => stack.at(-1).append(node);
  for (const token of tokens) {
    if (token.hidden) continue;
    if (token.nesting > 0) {
      const node = openNode(token);
      put(node);
      stack.push(node);
    } else if (token.nesting < 0) stack.pop();
    else if (token.type === "inline") build(taskItem(token, stack.at(-1)), stack.at(-1));
    else put(leafNode(token));
  }
  return root;
}

function openNode(token) {
  if (!ELEMENTS.has(token.tag)) return make("span");
  if (token.tag === "a") return link(token.attrGet("href"));
  const align = /text-align:(left|right|center)/.exec(token.attrGet("style") ?? "")?.[1];
  return make(token.tag, { start: token.tag === "ol" ? token.attrGet("start") : null, class: align ?? "" });
}

function link(href, ...children) {
  if (!md.validateLink(href)) return make("span", {}, ...children);
  return make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function leafNode(token) {
  switch (token.type) {
    case "code_inline": return make("code", {}, token.content);
    case "fence":
    case "code_block": return codeBlock(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0]);
    case "math": return mathNode(token.content, token.meta.isDisplay);
    case "hr": return make("hr");
    case "hardbreak": return make("br");
    case "softbreak": return document.createTextNode("\n");
    case "image": return link(token.attrGet("src"), `Image: ${token.content || token.attrGet("src")}`);
    default: return document.createTextNode(token.content);
  }
}

// "[ ] text" and "[x] text" at the beginning of a list item are boxes.
function taskItem(inline, parent) {
  const item = parent.tagName === "LI" ? parent : parent.parentNode;
  const [first, ...rest] = inline.children;
  const box = item?.tagName === "LI" && !item.textContent && first?.type === "text" && /^\[([ xX])\]\s/.exec(first.content);
  if (!box) return inline.children;
  const isDone = box[1] !== " ";
  item.classList.add("task");
  parent.append(make("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "to do" }), " ");
  return [Object.assign(Object.create(first), { content: first.content.slice(box[0].length) }), ...rest];
}

export function codeBlock(code, language = "") {
  const top = make("div", { class: "bar-top" }, make("span", {}, language || "text"), button("Copy", (node) => copyText(code, node)));
  return make("div", { class: "block" }, top, make("pre", { tabindex: "0" }, make("code", {}, ...highlight(code, language))));
}

function highlight(code, language) {
  if (!hljs.getLanguage(language) || code.length > MAX_HIGHLIGHT) return [code];
  const html = hljs.highlight(code, { language, ignoreIllegals: true }).value;
  // a parsed document is inert: nothing in it loads or runs, and only classes and text leave it
  return copySpans(new DOMParser().parseFromString(`<span>${html}</span>`, "text/html").body.firstChild);
}

function copySpans(parent) {
  return [...parent.childNodes].map((node) =>
    node.nodeType === Node.TEXT_NODE ? node.data : make("span", { class: node.className }, ...copySpans(node)));
}
