/** The sidebar and the panel: beside the conversation where there is room, over it where there is not. */

import { byId } from "./dom.js";
import * as store from "./store.js";

const NARROW = matchMedia("(max-width: 760px)"),
  TIGHT = matchMedia("(max-width: 1100px)");

const NAMES = ["settings", "engine"];

export class Panels {
  /** `onOpen(name)`: "settings", "engine", or null, whenever it changes. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.open = null;
    for (const name of NAMES) {
      byId(`panel-${name}`).addEventListener("click", () => this.show(this.open === name ? null : name));
      byId(`tab-${name}`).addEventListener("click", () => this.show(name));
      byId(`tab-${name}`).addEventListener("keydown", (event) => this.turn(event));
    }
    byId("panel-close").addEventListener("click", () => this.show(null, true));
    byId("sidebar-toggle").addEventListener("click", () => this.showSidebar(!this.hasSidebar));
    byId("veil").addEventListener("click", () => this.escape());
    NARROW.addEventListener("change", () => this.showSidebar(!NARROW.matches));
    TIGHT.addEventListener("change", () => this.veil());
    this.showSidebar(!NARROW.matches && store.look().sidebar !== false);
    const panel = store.look().panel;
    this.show(!TIGHT.matches && NAMES.includes(panel) ? panel : null);
  }

  show(name, returnsFocus = false) {
    const before = this.open;
    this.open = name;
    byId("panel").hidden = name === null;
    for (const each of NAMES) {
      byId(each).hidden = each !== name;
      byId(`tab-${each}`).setAttribute("aria-selected", String(each === name));
      byId(`tab-${each}`).tabIndex = each === name ? 0 : -1;
      byId(`panel-${each}`).setAttribute("aria-expanded", String(each === name));
    }
    this.veil();
    if (returnsFocus && before) byId(`panel-${before}`).focus();
    if (name && name !== before && TIGHT.matches) byId(`tab-${name}`).focus();
    store.saveLook({ panel: name });
    this.onOpen(name);
  }

  showSidebar(isShown) {
    this.hasSidebar = isShown;
    byId("sidebar").hidden = !isShown;
    byId("sidebar-toggle").setAttribute("aria-expanded", String(isShown));
    this.veil();
    if (!NARROW.matches) store.saveLook({ sidebar: isShown });
    else if (isShown) byId("new").focus();
  }

  closeSidebarIfOver() {
    if (NARROW.matches && this.hasSidebar) this.showSidebar(false);
  }

  /** Close what lies over the conversation. Whether there was anything. */
  escape() {
    if (NARROW.matches && this.hasSidebar) {
      this.showSidebar(false);
      byId("sidebar-toggle").focus();
      return true;
    }
    if (this.open && TIGHT.matches) {
      this.show(null, true);
      return true;
    }
    return false;
  }

  turn(event) {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = this.open === "settings" ? "engine" : "settings";
    this.show(other);
    byId(`tab-${other}`).focus();
  }

  /** What lies under something else cannot be reached, by no means. */
  veil() {
    const isSidebarOver = NARROW.matches && this.hasSidebar;
    const isPanelOver = TIGHT.matches && this.open !== null;
    byId("veil").hidden = !isSidebarOver && !isPanelOver;
    byId("main").inert = isSidebarOver || isPanelOver;
    byId("sidebar").inert = isPanelOver;
  }
}
