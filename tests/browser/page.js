// What the tests ask of an open notebook, by way of JupyterLab's own model of it. Loaded into every
// page before JupyterLab; needs --LabApp.expose_app_in_browser.
window.lab = (() => {
  const panel = () => window.jupyterapp.shell.currentWidget;
  const cells = () => panel().content.widgets;

  // A kernel's complaints, wherever JupyterLab would show them: in a cell, or in the log console
  // when a widget's callback wrote them.
  const said = [];
  // JupyterLab asks every kernel for its widgets, also one that has not imported any. The kernel
  // logs that; nothing shows, and no notebook can help it.
  const usual = /^No such comm target registered: jupyter\.widget\.control\s*$|^No such comm: \S+\s*$/;
  const listen = () =>
    panel().sessionContext.iopubMessage.connect((_, message) => {
      const parent = message.parent_header.msg_type;
      const content = message.content;
      if (message.header.msg_type === "stream" && content.name === "stderr")
        if (!usual.test(content.text)) said.push(`stderr (during ${parent}): ${content.text}`);
      if (message.header.msg_type === "error" && parent !== "execute_request")
        said.push(`an error outside of any cell: ${content.ename}: ${content.evalue}`);
    });

  const ready = () => {
    const context = window.jupyterapp?.restored && panel()?.sessionContext;
    return context?.isReady && context.session?.kernel?.status === "idle" && cells().length > 0;
  };

  // Close the notebook that is shown, and wait until it has said all that it says to that.
  const leave = async () => {
    panel().dispose();
    await new Promise((done) => setTimeout(done));
    said.length = 0;
  };

  // Another notebook in its place.
  const turnTo = async (path) => {
    const { shell, commands } = window.jupyterapp;
    shell.activateById((await commands.execute("docmanager:open", { path })).id);
  };

  // One entry per cell: what the model holds, and whether the page says that it waits or runs. Of
  // what an output has for each of its types, which can be megabytes, the types alone.
  const state = () =>
    cells().map((widget, index) => {
      const cell = widget.model.sharedModel.toJSON();
      return {
        index,
        type: cell.cell_type,
        source: Array.isArray(cell.source) ? cell.source.join("") : cell.source,
        tags: cell.metadata?.tags ?? [],
        count: cell.execution_count ?? null,
        outputs: (cell.outputs ?? []).map(({ data, ...output }) => ({
          ...output,
          types: Object.keys(data ?? {}),
        })),
        waits: waits(widget),
      };
    });

  const write = (index, source) => cells()[index].model.sharedModel.setSource(source);

  const waits = (widget) =>
    (widget.node.querySelector(".jp-InputPrompt")?.textContent ?? "").includes("*") ||
    widget.model.executionState === "running";

  // How far a cell has come. Asked many times while it runs, so nothing is copied.
  const stands = (index) => {
    const widget = cells()[index];
    return { count: widget.model.executionCount ?? null, waits: waits(widget) };
  };

  const outputs = ({ outputs }) => Array.from({ length: outputs?.length ?? 0 }, (_, i) => outputs.get(i));

  const failed = ({ model }) =>
    outputs(model).some((output) => output.type === "error") &&
    !(model.getMetadata("tags") ?? []).includes("raises-exception");

  const fails = () => cells().some(failed);

  // Whether a run of all cells has ended, well or not. Nothing is copied here either.
  const ended = () => {
    const code = cells().filter(({ model }) => model.type === "code" && model.sharedModel.source.trim());
    if (document.querySelector(".jp-Dialog")) return true;
    if (code.some(waits)) return false;
    return code.some(failed) || code.every(({ model }) => model.executionCount !== null);
  };

  const plots = (index) => [
    ...(index === null ? document : cells()[index].node).querySelectorAll(".js-plotly-plot"),
  ];

  // The words of some HTML, a line for each of its own.
  const plain = (html) => {
    const node = document.createElement("div");
    node.innerHTML = html.replace(/<(br|div)[^>]*>/g, "\n");
    return node.textContent.trim().replace(/\s*\n\s*/g, "\n");
  };

  // Whether a figure has points, and traces of any kind on the screen: bars, scatter, heat maps drawn
  // as an image.
  const isDrawn = (plot) =>
    (plot.calcdata ?? []).some((trace) => trace?.length) &&
    plot.querySelector(".trace, .trace *, .hm image, .heatmaplayer image") !== null &&
    plot.getBoundingClientRect().width > 0;

  // What a figure shows: its words and its numbers.
  const look = (plot) => {
    // A widget's title is text above its figure (paralab/view/widget_live.py).
    const head = plot.closest(".widget-vbox")?.querySelector(":scope > .paralab-head");
    const words = plain(plot.layout?.title?.text ?? head?.innerHTML ?? "");
    const notes = (plot.layout?.annotations ?? []).map((note) => note.text);
    const keys = ["x", "y", "z", "base", "width", "value", "values", "text"];
    const listed = (value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);
    const numbers = (plot.data ?? []).map((trace) => [
      trace.type, trace.name, trace.visible, ...keys.map((key) => listed(trace[key]) ?? null),
    ]);
    return {
      title: words,
      data: JSON.stringify(numbers),
      print: JSON.stringify([words, notes, numbers, plot.layout?.shapes?.length ?? 0]),
    };
  };

  const figures = (index = null) => plots(index).map(look);

  // What they show as a number each, by which two pictures are told apart without reading them.
  const prints = (index) => plots(index).map((plot) => numbered(look(plot).print));

  const numbered = (text) => {
    let sum = 0;
    for (let i = 0; i < text.length; i++) sum = (sum * 31 + text.charCodeAt(i)) % 4398046511093;
    return sum;
  };

  // Cells that promise a figure or a widget whose place on the page is still empty or broken.
  // JupyterLab draws what is in sight. scroll: go to the first of them, as a reader would.
  const missing = (scroll = false) => {
    const found = [];
    let first = null;
    cells().forEach(({ model, node }, index) => {
      const before = found.length;
      const stored = outputs(model);
      const has = (type) => stored.filter((output) => type in (output.data ?? {})).length;
      const shown = plots(index);
      const drawn = shown.filter(isDrawn).length;
      const promised = has("application/vnd.plotly.v1+json");
      if (drawn < promised) found.push(`cell ${index}: ${promised} figures promised, ${drawn} drawn`);
      if (drawn < shown.length) found.push(`cell ${index}: a figure without data, or not drawn`);
      const widgets = has("application/vnd.jupyter.widget-view+json");
      const here = node.querySelectorAll(".jp-OutputArea-output .jupyter-widgets").length;
      if (here < widgets) found.push(`cell ${index}: ${widgets} widgets promised, ${here} shown`);
      const text = widgets ? (node.querySelector(".jp-Cell-outputArea")?.textContent ?? "") : "";
      for (const trouble of ["Error displaying widget", "Error creating widget", "Loading widget"])
        if (text.includes(trouble)) found.push(`cell ${index}: ${trouble}`);
      if (found.length > before) first ??= index;
    });
    if (scroll && first !== null) panel().content.scrollToItem(first, "center");
    return found;
  };

  // Cells that do not show what they store: they have fewer pictures, which are images or figures,
  // or one that is not loaded.
  const blank = () =>
    cells().flatMap(({ model, node }, index) => {
      const stored = outputs(model).filter(
        ({ data = {} }) => "application/vnd.plotly.v1+json" in data || "image/png" in data,
      );
      const shown = [...node.querySelectorAll(".jp-OutputArea-output :is(img, .js-plotly-plot)")];
      const absent = ({ tagName, complete, naturalWidth }) =>
        tagName === "IMG" && !(complete && naturalWidth > 0);
      const all = shown.length >= stored.length && !shown.some(absent);
      return stored.length && !all ? [index] : [];
    });

  // {the words on a button of this cell: whether it can be pressed}
  const buttons = (index) =>
    Object.fromEntries(
      [...cells()[index].node.querySelectorAll(".jp-OutputArea-output button")].map((button) => [
        button.textContent.trim(), !button.disabled,
      ]),
    );

  const covered = (a, b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;

  // What a reader of this cell's output could not read, in words: text that is cut off at the edge of
  // its figure, its box or the page, text that covers other text, a legend that covers the picture, and
  // width that is left unused.
  const crowded = (index) => {
    const found = [];
    const area = cells()[index].node.querySelector(".jp-OutputArea-output");
    const room = area.getBoundingClientRect();
    const said = (node) => node.textContent.trim().slice(0, 60);
    const named = "label, button, .widget-label, .widget-readout, .widget-html-content, td, th";
    for (const node of area.querySelectorAll(named)) {
      const box = node.getBoundingClientRect();
      if (!box.width || !said(node)) continue;
      if (node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflow !== "visible")
        found.push(`cut in its box: ${said(node)}`);
      const within = node.closest("[style*='overflow-x:auto']") ?? node; // what is beyond is scrolled to
      if (within.getBoundingClientRect().right > room.right + 1) found.push(`beyond the page: ${said(node)}`);
    }
    let right = room.left;
    for (const plot of plots(index)) {
      const frame = plot.querySelector(".main-svg").getBoundingClientRect();
      const names = plot.querySelector(".legend")?.getBoundingClientRect();
      const inside = plot.querySelector(".nsewdrag")?.getBoundingClientRect();
      if (names && inside && covered(names, inside)) found.push("a legend covers its picture");
      right = Math.max(right, frame.right);
      if (frame.right > room.right + 1) found.push("a figure goes beyond the page");
      const words = [...plot.querySelectorAll(".main-svg text")]
        .filter((node) => said(node) && !node.closest(".hoverlayer"))
        .map((node) => ({ text: said(node), box: node.getBoundingClientRect() }))
        .filter(({ box }) => box.width > 0);
      words.forEach(({ text, box }, i) => {
        const { left, right, top, bottom } = frame;
        if (box.left < left - 1 || box.right > right + 1 || box.top < top - 1 || box.bottom > bottom + 1)
          found.push(`cut off by its figure: ${text}`);
        for (const other of words.slice(0, i)) {
          const wide = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
          const high = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
          // a line's box is higher than its letters
          if (wide > 1 && high > 0.3 * Math.min(box.height, other.box.height))
            found.push(`one covers the other: ${other.text} | ${text}`);
        }
      });
    }
    const unused = (room.right - right) / room.width;
    if (unused > 0.1) found.push(`${Math.round(100 * unused)} % of the width is unused`);
    return found;
  };

  const dialogs = () =>
    [...document.querySelectorAll(".jp-Dialog")].map((dialog) => dialog.textContent.trim());

  return {
    ...{ said, listen, leave, turnTo, ready, state, write, stands, fails, ended },
    ...{ figures, prints, missing, blank, buttons, crowded, dialogs },
  };
})();
