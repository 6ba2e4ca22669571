// The conversation menu: rename, export, import, delete.

import { $, onFiles, saveFile } from "./dom.js";
import * as store from "./store.js";

const fileName = (chat, kind) => `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat"}.${kind}`;

export const exportAll = () => saveFile("dsv4-conversations.json", store.toJson(store.listed()), "application/json");

function showTitleField(isShown) {
  $("title").hidden = isShown;
  $("title-field").hidden = !isShown;
}

export function initMenu({ getChat, select, remove, rename, tell }) {
  function startRename() {
    if (!getChat()) return;
    showTitleField(true);
    $("title-field").value = getChat().title;
    $("title-field").select();
  }

  function endRename() {
    if ($("title-field").hidden) return;
    showTitleField(false);
    rename($("title-field").value);
  }

  async function importFile(file) {
    try {
      const found = store.importJson(await file.text());
      if (found.length) select(store.chats.get(found[0].id));
      tell(found.length === 1 ? "1 conversation imported." : `${found.length} conversations imported.`);
    } catch (error) {
      tell(`${file.name}: ${error.message}.`);
    }
  }

  function on(id, work) {
    $(id).addEventListener("click", () => {
      $("more").open = false;
      $("more").querySelector("summary").focus();
      work(getChat());
    });
  }
  on("rename", startRename);
  on("export-markdown", (chat) => saveFile(fileName(chat, "md"), store.toMarkdown(chat), "text/markdown"));
  on("export-json", (chat) => saveFile(fileName(chat, "json"), store.toJson([chat]), "application/json"));
  on("delete", remove);
  on("export-all", exportAll);
  on("import", () => $("import-file").click());
  on("delete-all", () => { if (store.chats.size) remove(...store.listed()); });
  onFiles("import-file", ([file]) => importFile(file));
  document.addEventListener("click", (event) => { if (!$("more").contains(event.target)) $("more").open = false; });
  $("title").addEventListener("dblclick", startRename);
  $("title-field").addEventListener("blur", endRename);
  $("title-field").addEventListener("keydown", (event) => {
    if (event.key === "Escape") $("title-field").value = "";
    if (event.key !== "Escape" && event.key !== "Enter") return;
    event.stopPropagation();
    endRename();
    $("input").focus();
  });
}
