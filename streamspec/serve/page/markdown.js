// Renders Markdown: marked (marked.LICENSE.txt) reads it, and its tokens become elements here. No text becomes markup, no
// picture is loaded, and only links to the web are links.

import { marked } from "/page/marked.esm.js";
import { make } from "/page/answer.js";

const FURTHEST = 500; // characters of syntax, such as an address, between two that are shown

const BLOCKS = {
  heading: (token) => filled(`h${Math.min(token.depth + 2, 6)}`, inline(token)), // below the page's own headings
  paragraph: (token) => filled("p", inline(token)),
  text: (token) => filled("p", inline(token)),
  blockquote: (token) => filled("blockquote", blocks(token.tokens)),
  list: (token) => {
    const list = filled(token.ordered ? "ol" : "ul", token.items.map((item) => filled("li", blocks(item.tokens, !item.loose))));
    if (token.ordered && token.start > 1) list.start = token.start;
    return list;
  },
  code: (token) => {
    const frame = filled("pre", [make("code", "", token.text)]);
    frame.tabIndex = 0; // it scrolls
    frame.dataset.language = token.lang ?? "";
    return frame;
  },
  hr: () => make("hr", ""),
  table: (token) => {
    const row = (cells, tag) => filled("tr", cells.map((cell) => filled(tag, inline(cell))));
    const head = filled("thead", [row(token.header, "th")]), body = filled("tbody", token.rows.map((cells) => row(cells, "td")));
    const frame = filled("div", [filled("table", [head, body])], "table");
    frame.tabIndex = 0;
    return frame;
  },
};

const INLINES = {
  strong: (token) => filled("strong", inline(token)),
  em: (token) => filled("em", inline(token)),
  del: (token) => filled("del", inline(token)),
  codespan: (token) => make("code", "", token.text),
  br: () => make("br", ""),
  link: (token) => {
    if (!/^https?:\/\//i.test(token.href)) return filled("span", inline(token));
    const link = filled("a", inline(token));
    Object.assign(link, { href: token.href, target: "_blank", rel: "noopener noreferrer" });
    return link;
  },
};

/** Elements for the blocks of `text`. */
export function render(text) {
  return blocks(marked.lexer(text));
}

/**
 * Splits the text under `element` where tokens end and gives every piece to `mark(piece, number)`, a span and its token.
 * `pieces`: the texts of the tokens, which together are the source that was rendered. What is shown is what is left of
 * the source without its syntax, so each character is the next one like it.
 */
export function markTokens(element, pieces, mark) {
  const source = pieces.join("");
  const ends = [];
  for (const piece of pieces) ends.push((ends.at(-1) ?? 0) + piece.length);
  let at = 0, number = 0;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes) {
    const spans = [];
    let last = -1;
    for (const character of node.data) {
      const found = source.indexOf(character, at);
      if (found >= 0 && found - at < FURTHEST) at = found + character.length;
      while (number < ends.length - 1 && ends[number] < at) number++;
      if (number !== last) spans.push(mark(make("span", ""), number));
      spans.at(-1).textContent += character;
      last = number;
    }
    node.replaceWith(...spans);
  }
}

/** `tight`: items of a list whose lines are not paragraphs. */
function blocks(tokens, tight = false) {
  return tokens.filter((token) => token.type !== "space" && token.type !== "def").flatMap((token) => {
    if (tight && token.type === "text") return inline(token);
    return [BLOCKS[token.type]?.(token) ?? filled("p", [document.createTextNode(token.raw)])];
  });
}

function inline(token) {
  if (!token.tokens) return [document.createTextNode(token.text ?? token.raw)];
  return token.tokens.map((part) => INLINES[part.type]?.(part) ?? (part.tokens ? filled("span", inline(part)) : document.createTextNode(part.text ?? part.raw)));
}

function filled(tag, children, name = "") {
  const element = make(tag, name);
  element.append(...children);
  return element;
}
