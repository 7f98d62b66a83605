"""Evidence of other languages: frequent words of thirty languages that are rare in English."""

_FREQUENT = """
Afrikaans: nie het vir dit hulle ek wat wees sal haar hom deur ook kan baie jy sy van en
Basque: eta da du ez dute dira baina egin izan duen dela beste hori gure baino zuen ziren edo bere
Catalan: el els les amb que una dels més però també és són aquest aquesta seva seu va ser pel molt fer
Croatian: je su se da na za od koji koja koje što nije biti kao ili bio bila samo kako može već
Czech: je se na že si jsem jako ale jsou který která které byl byla bylo není také nebo jeho když aby kde jen
Danish: og er det en af på til som med ikke der har jeg et han hun var kan blev efter også eller fra
Dutch: de het een en van dat niet zijn voor op te aan ook als maar werd wordt bij naar heeft uit deze ik je
Esperanto: la kaj estas en de al ne ĉiuj ili ni kiu kiuj por sed tio estis lia ŝi kun kiel oni pli sur
Estonian: ja ei et kui oli mis ning aga ta kes ka oma selle nii siis või mitte nad mida
Finnish: ja ei se että hän oli mutta kun niin joka minä hänen myös ovat tai kuin jos nyt sekä ole mitä olla
French: le la les des du de et est une un que qui dans pour pas sur avec il elle nous vous je ce cette ses au aux
    par mais ou être ont sont était même leur comme
Galician: os unha que dun dunha máis pola polo nos aos seu súa tamén foi pero onde está
German: der das und ist nicht ein eine einen einem einer eines zu dem des mit sich auf für von ich sie er es wir ihr
    auch als wie aus bei nach wird werden sind haben wenn oder aber durch über noch nur um zum zur
Hungarian: az hogy nem egy és van meg csak volt már még mint vagy ez azt de kell lesz itt ott ki minden akkor
Icelandic: og að er sem það ekki til við hann var hún en fyrir með um af frá eru hefur þegar þetta mér sér
Indonesian: yang di itu dengan untuk tidak ini dari dalam akan pada juga ke karena ada mereka saya adalah kita atau
    oleh sudah bisa telah lebih orang setiap semua
Irish: agus na ar sé tá bhí sí ag le ní ach mar atá raibh bheith féin chun
Italian: il lo la gli le di che una un è del della dei delle con sono si da nel nella anche più alla al questo
    questa essere suo sua ogni tutti degli
Latin: et est ut cum sed quod qui quae si enim esse sunt ab eius autem nec atque quam hoc ac etiam neque omnes quo
Lithuanian: ir yra kad į su iš tai bet kaip jis ne buvo jo ji savo dar taip už apie jau tik arba
Norwegian: og er det en av på til som med ikke jeg har han hun var kan ble etter også eller fra hadde hvor
Polish: nie się na jest że jak ale po tak za od jego był była było tego który która które dla przez oraz przy tylko
    jestem są ze
Portuguese: os de da dos das que não um uma em na nos por para se mais como mas foi ao ele ela seu sua são ser
    quando também isso você está muito pelo pela todos
Romanian: și în nu de la cu pe că este un din mai sunt fi au pentru sau dar după prin fost acest această
Slovak: je sa na že si som ako ale sú ktorý ktorá ktoré bol bola bolo nie aj alebo jeho keď aby kde len
Spanish: el la los las de que y en un una es con por para se del lo su sus al más pero como fue está ser este esta
    muy también cuando todo hay porque sobre entre
Swahili: na ya wa kwa ni katika za la hii kama watu yake cha si hiyo kuwa haki mtu kila wao zote bila
Swedish: och är att det som en på av för med inte har jag om ett han hon var kan från eller så när också efter alla
    skulle
Tagalog: ang ng sa mga na hindi ko ito siya para kung niya ako lang ka si isang kanyang lahat
Turkish: bir ve bu da için ile çok ne daha gibi var olarak değil kadar sonra onun olan mi ama
Vietnamese: và là của không có một cho được những trong người này với các đã để khi
Welsh: yn y yr ac ar mae ei bod wedi oedd gan fod nid hyn eu gyda mewn oherwydd pob sydd
"""
FOREIGN = frozenset(word for word in _FREQUENT.split() if not word.endswith(":"))
