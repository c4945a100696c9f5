// A plotly figure on a page of several: plotly's own code, 5 MB of it, comes with the first figure and
// is loaded once for all. anywidget gives a figure two seconds to initialize; four times 5 MB take
// longer on a slow machine. So a figure is initialized at once, and drawn when the code is there.
const loaded = (globalThis["paralab plotly VERSION"] ??= {});
loaded.code ??= new Promise((done) => {
  loaded.done = done;
});

const load = async (text) => {
  if (!text || loaded.begun) return;
  loaded.begun = true;
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  loaded.done(await import(url));
  URL.revokeObjectURL(url);
};

export default () => {
  let figure;
  return {
    initialize(context) {
      // Not at once: its five megabytes would hold the page while the two seconds run.
      setTimeout(() => load(context.model.get("_bundle")), 50);
      figure = loaded.code.then(async (code) => {
        const made = await code.default();
        await made.initialize(context);
        return made;
      });
    },
    render(context) {
      let gone = false;
      let end;
      figure.then((made) => {
        if (!gone) end = made.render(context);
      });
      return () => {
        gone = true;
        end?.();
      };
    },
  };
};
