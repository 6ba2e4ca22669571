// Math for markdown-it: $…$, $$…$$, \(…\), \[…\] and bare \begin{…}…\end{…}; typeset by KaTeX.

import { make } from "./dom.js";

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const ENVIRONMENT = /^\\begin\{((?:equation|align|gather|multline|alignat|[bpvBV]?matrix|cases)\*?)\}/;
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 };

export function mathPlugin(md) {
  md.inline.ruler.before("escape", "math", inlineMath);
  md.block.ruler.before("fence", "math_block", blockMath, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function inlineMath(state, isSilent) {
  const text = state.src;
  const pair = PAIRS.find(([open]) => text.startsWith(open, state.pos));
  if (!pair) return false;
  const [open, close, isDisplay] = pair;
  const begin = state.pos + open.length;
  const end = findClose(text, begin, state.posMax, close);
  const tex = end < 0 ? "" : text.slice(begin, end);
  if (!tex.trim() || tex.includes("\n\n")) return false;
  // "$5 and $10" is money: no space inside the marks, no digit after them
  if (open === "$" && (/^\s|\s$/.test(tex) || /\d/.test(text[end + 1] ?? ""))) return false;
  if (!isSilent) Object.assign(state.push("math", "", 0), { content: tex, meta: { isDisplay } });
  state.pos = end + close.length;
  return true;
}

function findClose(text, begin, end, close) {
  for (let at = begin; at < end; at += 1) {
    if (text.startsWith(close, at) && at + close.length <= end) return at;
    if (text[at] === "\\") at += 1;
  }
  return -1;
}

function blockMath(state, line, lastLine, isSilent) {
  const lineText = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]).trimEnd();
  const first = lineText(line);
  const environment = ENVIRONMENT.exec(first);
  const pair = environment ? ["", `\\end{${environment[1]}}`] : PAIRS.find(([open, , isDisplay]) => isDisplay && first.startsWith(open));
  if (!pair) return false;
  const [open, close] = pair;
  const found = [];
  for (let at = line; at < lastLine; at += 1) {
    const text = at === line ? first.slice(open.length) : lineText(at);
    const isLast = text.endsWith(close);
    found.push(isLast && !environment ? text.slice(0, -close.length) : text);
    if (!isLast) continue;
    if (!found.join("").trim()) return false;
    if (isSilent) return true;
    Object.assign(state.push("math", "", 0), { block: true, content: found.join("\n"), map: [line, at + 1], meta: { isDisplay: true } });
    state.line = at + 1;
    return true;
  }
  return false;
}

export function mathNode(tex, isDisplay) {
  const node = make(isDisplay ? "div" : "span", { class: isDisplay ? "math display" : "math" });
  try {
    window.katex.render(tex.trim(), node, { ...OPTIONS, displayMode: isDisplay });
  } catch (error) {
    node.replaceChildren(make("code", { title: error.message }, tex.trim()));
  }
  return node;
}
